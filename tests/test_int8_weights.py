"""``EngineConfig(weights="int8")``: logits of the rounded model, updates that are seen, and what is refused."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.pytorch_utils import Conv1D

import selective_compile as sc
from selective_compile import int8_weights
from selective_compile.backend import compile_step_program
from selective_compile.coverage.random_model import random_model
from selective_compile.int8_ops import as_int8
from selective_compile.int8_weights import Int8Weights
from selective_compile.isolated_program import IsolatedProgram
from selective_compile.module_program import ModuleProgram
from selective_compile.options import EngineConfig
from selective_compile.passes.flat_graph import FlatGraph, Quantised
from selective_compile.passes.quantise import quantise
from selective_compile.runtime.engine import Engine
from selective_compile.sequential_program import SequentialProgram
from selective_compile.tensor_state import states
from tests.decoders import WIDTH, Decoder
from tests.oracle import assert_same_tokens
from tests.test_module_program import Experts

CONFIG = EngineConfig(compile=False, weights="int8", max_kv_tokens=1024)
PROMPTS = [[5, 6, 7, 8, 9], [3], [9, 4, 2, 11, 13, 1, 7]]


def rounded(model: nn.Module, but: tuple[str, ...] = ()) -> nn.Module:
    """The model whose linear layers, but those of some paths, have the weights that int8 stands for."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in [m for path, m in other.named_modules() if isinstance(m, nn.Linear) and path not in but]:
            numbers, scales = as_int8(layer.weight)
            layer.weight = nn.Parameter(numbers * scales[:, None])
    return other


def tokens_of(engine: Engine) -> list[list[int]]:
    config = GenerationConfig(max_new_tokens=12, do_sample=False)
    handles = [engine.submit(prompt, config) for prompt in PROMPTS]
    while engine.step():
        pass
    return [list(handle.result().tokens) for handle in handles]


def assert_tokens_are_those_of(model: nn.Module, engine: Engine) -> None:
    for prompt, tokens in zip(PROMPTS, tokens_of(engine), strict=True):
        assert_same_tokens(model, prompt, tokens)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_neox"])
def test_tokens_are_those_of_the_model_with_rounded_weights(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(model_type)
    with caplog.at_level(logging.INFO, "selective_compile"):
        engine = Engine(model, CONFIG)
    assert "weights are int8" in caplog.text and "relative error" in caplog.text
    assert "requests may get other tokens than by generate" in caplog.text and "linear layers" not in caplog.text
    expected = rounded(model)  # embeddings, tied ones too, are not rounded
    assert tokens_of(engine) == tokens_of(Engine(expected, EngineConfig(compile=False, max_kv_tokens=1024)))
    errors = compile_step_program(model, CONFIG).int8_weights.errors  # type: ignore[union-attr]
    assert errors and 0.001 < max(errors) < 0.02


def test_experts_are_rounded_row_by_row(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("qwen3_moe")
    with caplog.at_level(logging.INFO, "selective_compile"):
        engine = Engine(model, CONFIG)
    assert "model.layers.0.mlp.experts" not in caplog.text
    expected, seen = rounded(model), 0
    with torch.no_grad():
        for name, weight in expected.named_parameters():
            if "experts" in name:
                numbers, scales = as_int8(weight)
                weight.copy_(numbers * scales[..., None])
                seen += weight.dim() == 3
    before = tokens_of(engine)
    assert before == tokens_of(Engine(expected, EngineConfig(compile=False, max_kv_tokens=1024))) and seen == 4
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(-3)
    assert tokens_of(engine) != before


@pytest.mark.parametrize(("model_type", "layers"), [("gpt2", Conv1D), ("gpt_oss", GptOssExperts)])
def test_what_lies_by_columns_is_rounded_column_by_column(model_type: str, layers: type[nn.Module]) -> None:
    model = random_model(model_type)
    engine = Engine(model, CONFIG)
    expected, seen = rounded(model), 0
    of_layers = (layer for layer in expected.modules() if isinstance(layer, layers))
    for weight in [p for layer in of_layers for name, p in layer.named_parameters() if "bias" not in name]:
        numbers, scales = as_int8(weight.mT)
        with torch.no_grad():
            weight.copy_((numbers * scales[..., None]).mT)
        seen += 1
    for router in [layer for layer in expected.modules() if isinstance(layer, GptOssTopKRouter)]:
        numbers, scales = as_int8(router.weight)
        router.weight = nn.Parameter(numbers * scales[:, None])
    before = tokens_of(engine)
    assert before == tokens_of(Engine(expected, EngineConfig(compile=False, max_kv_tokens=1024))) and seen >= 4
    with torch.no_grad():
        weight = next(p for name, p in model.named_parameters() if name.endswith(("c_proj.weight", "down_proj")))
        weight.mul_(-3)
    assert tokens_of(engine) != before


def test_a_changed_weight_is_seen() -> None:
    model = random_model("llama")
    engine = Engine(model, CONFIG)
    before = tokens_of(engine)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)
        model.lm_head.weight.data = torch.randn_like(model.lm_head.weight)
    after = tokens_of(engine)
    assert after != before
    assert after == tokens_of(Engine(rounded(model), EngineConfig(compile=False, max_kv_tokens=1024)))


def test_inductor_compiles_it_and_the_weights_take_a_fourth_of_the_bytes() -> None:
    model = random_model("llama")
    program = compile_step_program(model, EngineConfig(weights="int8"))
    linear = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    assert linear / 4 < program.int8_weights.num_bytes < 0.5 * linear  # type: ignore[union-attr]
    compiled = Engine(model, EngineConfig(weights="int8", max_kv_tokens=1024), program=program)
    assert tokens_of(compiled) == tokens_of(Engine(model, CONFIG))


def test_models_without_a_linear_layer_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="weights must be 'model' for a model that runs whole"):
        Engine(random_model("reformer"), EngineConfig(compile=False, weights="int8"))
    with pytest.raises(ValueError, match="weights must be one of 'model', 'int8', got 'int4'"):
        EngineConfig(weights="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights must be 'model' for a model without linear layers .* 'int8' on cpu"):
        Engine(random_model("llama").half(), EngineConfig(compile=False, weights="int8"))


def test_a_program_serves_only_engines_with_the_weights_that_it_was_compiled_for() -> None:
    model = Decoder(layers=1)
    plain = EngineConfig(compile=False, max_kv_tokens=1024)
    for compiled, wanted in ((CONFIG, plain), (plain, CONFIG)):
        with pytest.raises(ValueError, match="weights must be that which the program was compiled for"):
            Engine(model, wanted, program=compile_step_program(model, compiled))
    whole = random_model("llama")
    program = SequentialProgram(whole, ())
    with pytest.raises(ValueError, match="weights must be 'model' for a program that runs one request after another"):
        Engine(whole, CONFIG, program=program)


def some_weights(count: int = 3) -> tuple[list[Tensor], Int8Weights]:
    return [torch.randn(4, 5) for _ in range(count)], Int8Weights([Quantised(place) for place in range(count)])


def test_nobody_gets_numbers_that_are_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines share a program, and one looks while the other makes the numbers."""
    weights, int8 = some_weights()
    begun, go_on, made = threading.Event(), threading.Event(), []

    def slow(weight: Tensor) -> tuple[Tensor, Tensor]:
        if weight is weights[1]:
            begun.set()
            assert go_on.wait(10)
        made.append(weight)
        return as_int8(weight)

    monkeypatch.setattr(int8_weights, "as_int8", slow)
    found: list[tuple[int, Any]] = []

    def look() -> None:
        operands = int8.of(weights, states(weights))
        found.append((len(operands), operands))

    threads = [threading.Thread(target=look) for _ in range(2)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert [count for count, _ in found] == [6, 6] and len(made) == 3
    assert all(a is b for a, b in zip(found[0][1], found[1][1], strict=True))


def test_what_is_dropped_while_it_is_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, int8 = some_weights(1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(weight: Tensor) -> tuple[Tensor, Tensor]:
        numbers = as_int8(weight)
        begun.set()
        assert go_on.wait(10)
        return numbers

    monkeypatch.setattr(int8_weights, "as_int8", slow)
    seen = states(weights)
    maker = threading.Thread(target=int8.of, args=(weights, seen))
    maker.start()
    assert begun.wait(10)
    weights[0].data.mul_(-1)
    dropping = threading.Thread(target=int8.drop)
    dropping.start()
    dropping.join(0.1)
    go_on.set()
    maker.join(10)
    dropping.join(10)
    assert torch.equal(int8.of(weights, seen)[0], as_int8(weights[0])[0])


def test_the_old_numbers_go_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, int8 = some_weights()
    old = [weakref.ref(tensor) for tensor in int8.of(weights, states(weights))]
    alive = []

    def noting(weight: Tensor) -> tuple[Tensor, Tensor]:
        alive.append(sum(one() is not None for one in old))
        return as_int8(weight)

    monkeypatch.setattr(int8_weights, "as_int8", noting)
    weights[2].mul_(2)
    int8.of(weights, states(weights))
    assert alive == [0, 0, 0]


def test_a_replaced_weight_keeps_its_identity_from_others() -> None:
    weights, int8 = some_weights(1)
    held = weakref.ref(weights[0])
    int8.of(weights, states(weights))
    weights[0] = torch.randn(4, 5)
    assert held() is not None  # until others are made


def test_steps_look_at_the_weights_once_and_other_tensors_are_none_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(layers=1)
    engine = Engine(model, CONFIG)
    looks: list[Any] = []
    made: list[Any] = []
    monkeypatch.setattr(int8_weights, "states", lambda *given: looks.append(1) or states(*given))
    monkeypatch.setattr(int8_weights, "as_int8", lambda weight: made.append(1) or as_int8(weight))
    tokens_of(engine)
    assert not looks and not made
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    tokens_of(engine)
    assert len(looks) == 1 and not made
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    tokens_of(engine)
    assert len(looks) == 2 and made


def other_values(layer: nn.Linear) -> None:
    """In a way that PyTorch does not count."""
    layer.weight.data.copy_(torch.randn_like(layer.weight))


def test_values_put_in_place_through_data_are_used_once_what_was_computed_is_dropped() -> None:
    model = Decoder(layers=1)
    engine = Engine(model, CONFIG)
    before = tokens_of(engine)
    other_values(model.head)
    assert tokens_of(engine) == before  # as docs/limits.md says: nothing tells of it
    request = engine.submit([5, 6, 7], max_new_tokens=4, do_sample=False)
    engine.step()
    engine.drop_computed(if_idle=True)
    request.result()
    assert tokens_of(engine) == before
    engine.drop_computed()
    assert_tokens_are_those_of(rounded(model), engine)
    assert tokens_of(engine) != before


def test_generate_sees_values_put_in_place_through_data() -> None:
    model = random_model("llama")
    ids = torch.tensor([PROMPTS[0]])

    def generated(config: EngineConfig, of: Any) -> list[int]:
        with sc.wrapped(of, config):
            return of.generate(ids, max_new_tokens=12, do_sample=False).tolist()

    before = generated(CONFIG, model)
    other_values(model.model.layers[0].mlp.down_proj)
    after = generated(CONFIG, model)
    assert after != before
    assert after == generated(EngineConfig(compile=False, max_kv_tokens=1024), rounded(model))


class Projected(nn.Module):
    """A mixer that nobody knows, with a linear layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).cummax(1).values


class WithModule(Decoder):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(layers=1)
        self.apart = kind()
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        x = self.blocks[0](x, self.mask(input_ids, attention_mask))
        return self.head(self.norm(x + self.apart(x)))


@pytest.mark.parametrize(
    ("kind", "program", "left", "layer"),
    [
        (Projected, IsolatedProgram, "3 of two dimensions and more stay as they are", "apart.project"),
        (Experts, ModuleProgram, "4 of two dimensions and more stay as they are", "apart.router"),
    ],
)
def test_what_modules_that_run_by_themselves_have_is_not_rounded_and_that_is_said(
    kind: type[nn.Module], program: type[ModuleProgram], left: str, layer: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = WithModule(kind)
    with caplog.at_level(logging.WARNING, "selective_compile"):
        engine = Engine(model, CONFIG)
    assert type(engine._program) is program
    assert "5 weights of WithModule are int8 (weights)" in caplog.text and left in caplog.text
    assert f"among these are 1 linear layers, as in modules that run by themselves: {layer}" in caplog.text
    assert_tokens_are_those_of(rounded(model, (layer,)), engine)
    before = tokens_of(engine)
    other_values(model.head)
    other_values(model.get_submodule(layer))  # type: ignore[arg-type]
    engine.drop_computed()
    assert_tokens_are_those_of(rounded(model, (layer,)), engine)
    assert tokens_of(engine) != before


def test_weights_that_are_no_linear_layers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "selective_compile"):
        compile_step_program(random_model("gpt2"), CONFIG)
    assert "9 weights of GPT2LMHeadModel are int8" in caplog.text and "transformer.wpe.weight" in caplog.text


def test_a_weight_that_lies_by_columns() -> None:
    model = Decoder(layers=1)
    layer = model.blocks[0].down
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert not layer.weight.is_contiguous()
    assert_tokens_are_those_of(rounded(model), Engine(model, CONFIG))


class OnGpu(FlatGraph):
    device = torch.device("cuda")  # type: ignore[assignment]


def test_other_devices_are_left_alone() -> None:
    """For a batch-invariant engine layers have the same operator there."""
    flat = compile_step_program(Decoder(layers=1), EngineConfig(compile=False)).rewritten.flat  # type: ignore[union-attr]
    assert flat is not None
    flat.__class__ = OnGpu
    assert quantise(flat) == 0 and not flat.quantised
