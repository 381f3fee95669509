"""Keys and values kept as e4m3, next to Hugging Face with a cache that rounds what it is given in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import selective_compile as sc
from selective_compile import fp8_rows, fp8_scales, programs, tiny_model
from selective_compile.backend import Program, compile_step_program
from selective_compile.coverage.random_model import random_model, vocabulary_of
from selective_compile.generate_states import CACHE
from selective_compile.options import EngineConfig
from selective_compile.runtime.kv_cache import allocate_pools
from selective_compile.runtime.logit_error import logit_error, prompt_logits
from tests.models import tiny
from tests.prefix_models import prefix_model
from tests.runtime.played_stream import TapedStream

CONFIG = EngineConfig(compile=False, max_kv_tokens=4096, block_size=8, kv_dtype="fp8")
PROMPT = [(13 * place + 7) % 97 for place in range(37)]


class Rounding(DynamicCache):
    """Hands the model its keys and values [1, K, S, D] as e4m3 would keep them, with a program's scales.

    DeepSeek-V3 keeps its latents as keys of one head, and what goes with them as values; they have one scale.
    """

    def __init__(self, scales: tuple[Tensor, ...], *, sites: int, **options: Any) -> None:
        super().__init__(**options)
        self.scales = [scales[i * len(scales) // sites : (i + 1) * len(scales) // sites] for i in range(sites)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = self.scales[layer_idx][0], self.scales[layer_idx][-1]
        return super().update(rounded(key_states, keys), rounded(value_states, values), layer_idx, *args, **kwargs)


def rounded(rows: Tensor, scales: Tensor) -> Tensor:
    kept = fp8_rows.quantised(rows.transpose(1, 2), scales)
    return fp8_rows.dequantised(kept, scales, rows.dtype).transpose(1, 2)


@torch.no_grad()
def rounding_logits(model: Any, tokens: list[int], program: Program) -> Tensor:
    cache = Rounding(program.kv_scales, sites=len(program.call_sites), config=model.config)
    return model(torch.tensor([tokens]), **{CACHE: cache}, use_cache=True).logits[0].float()


@torch.no_grad()
def exact_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def configured(**changes: Any) -> EngineConfig:
    return EngineConfig(**{**vars(CONFIG), **changes})


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "deepseek_v3"])
def test_logits_are_those_of_the_model_with_rounded_keys_and_values(family: str) -> None:
    """In one piece and in chunks; the bar is what rounding itself does."""
    model = tiny(family, attention="eager", initializer_range=0.2)
    program = compile_step_program(model, CONFIG)
    expected, exact = rounding_logits(model, PROMPT * 2, program), exact_logits(model, PROMPT * 2)
    assert apart(expected, exact) > 3e-3 * float(exact.std())
    for budget in (512, 7):
        found = prompt_logits(sc.Engine(model, configured(token_budget=budget), program=program), PROMPT * 2)
        assert apart(found, expected) < 0.1 * apart(expected, exact)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("implementation", ["auto", "triton"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_so_are_those_of_a_model_whose_first_tokens_see_one_another(
    family: str, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "triton":  # scales are measured in its interpreter
        monkeypatch.setattr(fp8_scales, "TOKENS", 20)
    model = prefix_model(5, family, initializer_range=0.2)
    config = configured(implementation=implementation, token_budget=7)
    program = compile_step_program(model, config)
    expected, exact = rounding_logits(model, PROMPT[:20], program), exact_logits(model, PROMPT[:20])
    assert apart(expected, exact) > 3e-3 * float(exact.std())
    found = prompt_logits(sc.Engine(model, config, program=program), PROMPT[:20])
    assert apart(found, expected) < 0.1 * apart(expected, exact)


@pytest.mark.parametrize("size", (1e-4, 1.0, 3e4))
def test_scales_fit_numbers_of_any_size(size: float) -> None:
    """Powers of two with room for larger numbers than were seen; so the error is the same at any size."""
    model = tiny("llama", initializer_range=0.2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= size
            layer.self_attn.o_proj.weight /= size
            layer.self_attn.k_proj.weight *= size
            layer.self_attn.q_proj.weight /= size
    program = compile_step_program(model, CONFIG)
    assert len(program.kv_scales) == 4
    for scales in program.kv_scales:
        assert torch.equal(scales.log2(), scales.log2().round())
        assert scales.log2().mean() == pytest.approx(torch.tensor(size / 100).log2(), abs=4)
    error = apart(prompt_logits(sc.Engine(model, CONFIG, program=program), PROMPT), exact_logits(model, PROMPT))
    assert error < 0.2 * float(exact_logits(model, PROMPT).std())


def multiply_in_place(weight: Tensor, factor: float, engines: list[sc.Engine]) -> None:
    weight.mul_(factor)


def put_another(weight: Tensor, factor: float, engines: list[sc.Engine]) -> None:
    weight.data = weight * factor


def copy_uncounted(weight: Tensor, factor: float, engines: list[sc.Engine]) -> None:
    weight.data.copy_(weight * factor)
    for engine in engines:
        engine.drop_computed()


@pytest.mark.parametrize("change", (multiply_in_place, put_another, copy_uncounted))
@pytest.mark.parametrize("captured", (False, True))
@torch.no_grad()
def test_scales_are_of_the_weights_that_are_there(change: Callable[..., None], captured: bool) -> None:
    """Values that grow beyond those of before would be cut off; two engines share the program."""
    model: Any = tiny("llama", initializer_range=0.2, num_hidden_layers=1)
    program = compile_step_program(model, CONFIG)
    stream = TapedStream(captures=True) if captured else None
    engines = [sc.Engine(model, CONFIG, program=program, stream=stream) for _ in range(2)]
    before, attention = [scales.log2() for scales in program.kv_scales], model.model.layers[0].self_attn
    tokens = [tokens_of(engine) for engine in engines]
    for factor, log in ((2.0**12, 12), (2.0**-12, 0)):
        change(attention.v_proj.weight, factor, engines)
        change(attention.o_proj.weight, 1 / factor, engines)
        assert [tokens_of(engine) for engine in engines] == tokens
        assert torch.equal(program.kv_scales[0].log2(), before[0])
        assert torch.equal(program.kv_scales[1].log2(), before[1] + log)


def tokens_of(engine: sc.Engine) -> list[int]:
    request = engine.submit(PROMPT, max_new_tokens=8)
    while engine.step():
        pass
    return request.tokens


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any, Program]:
    model, tokenizer = tiny_model.load()
    return model, tokenizer, compile_step_program(model, CONFIG)


@pytest.mark.parametrize(
    "changes", [{}, {"token_budget": 11, "max_requests": 3}, {"max_kv_tokens": 64, "block_size": 4}], ids=str
)
def test_tokens_with_clear_margins_are_those_of_generate(shipped: tuple[Any, Any, Program], changes: Any) -> None:
    """In chunks, among others, preempted."""
    model, tokenizer, program = shipped
    engine = sc.Engine(model, configured(**changes), program=program)
    texts = ("12+7=", "3+4=", "count from 3 to 9:", "15+8=")
    prompts = [list(tokenizer(text).input_ids) for text in texts]
    for _ in range(2):
        requests = [engine.submit(prompt, max_new_tokens=6) for prompt in prompts]
        while engine.step():
            engine._scheduler.check()
        for prompt, request in zip(prompts, requests, strict=True):
            ids = torch.tensor([prompt])
            own = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
            assert list(request.tokens) == own[0, len(prompt) :].tolist()


def test_pools_take_a_byte_for_a_number(shipped: tuple[Any, Any, Program]) -> None:
    model, _, program = shipped
    engine = sc.Engine(model, CONFIG, program=program)
    assert engine.kv_bytes_per_token == 5 * 2 * 2 * 32
    ((keys, values), *_) = allocate_pools(program.call_sites, (3,), 8)
    assert keys.dtype == values.dtype == torch.float8_e4m3fn


def test_the_error_is_measured(shipped: tuple[Any, Any, Program]) -> None:
    model, tokenizer, _ = shipped
    prompts = [list(tokenizer(text).input_ids) for text in ("the key is in the box", "12+7=19", "count from 3 to 9:")]
    error = logit_error(model, prompts, CONFIG)
    assert 0 < error.mean_error < 0.1 and (error.exact_kv_bytes, error.kv_bytes) == (2560, 640)


def test_what_cannot_keep_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="kv_dtype must be 'auto' with implementation 'cpu', got 'fp8'"):
        configured(implementation="cpu")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, message in (((8, 0), "of compute capability 8.0, got 'fp8', which takes 8.9"), ((8, 9), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if message is None:
            programs.check_fp8(gpu, {torch.bfloat16})
        else:
            with pytest.raises(ValueError, match=message):
                programs.check_fp8(gpu, {torch.bfloat16})


def test_a_model_of_float32_is_refused_on_a_gpu() -> None:
    """Its kernels would spill registers; on a CPU there are none."""
    with pytest.raises(ValueError, match="kv_dtype must be 'auto' for a model of float32 on a GPU, got 'fp8'"):
        programs.check_fp8(torch.device("cuda", 0), {torch.float32})
    programs.check_fp8(torch.device("cpu"), {torch.float32})


def test_latents_are_kept_as_e4m3_and_not_expanded() -> None:
    program = compile_step_program(tiny("deepseek_v3"), CONFIG)
    kept = {"auto": compile_step_program(tiny("deepseek_v3"), configured(kv_dtype="auto")), "fp8": program}
    numbers = {name: sum(site.bytes_per_token for site in each.call_sites) for name, each in kept.items()}
    assert numbers["auto"] == 4 * numbers["fp8"]
    assert [scales.shape for scales in program.kv_scales] == [(1,)] * len(program.call_sites)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_through_triton(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its interpreter, which takes long for the step that scales are measured in: here for a short one."""
    monkeypatch.setattr(fp8_scales, "TOKENS", 20)
    check_same(family, implementation="triton")


def test_selected_keys_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an indexer selects by is kept as it is."""
    monkeypatch.setattr(fp8_scales, "TOKENS", 20)
    model: Any = random_model("deepseek_v32")
    prompt = [place % vocabulary_of(model) for place in PROMPT[:20]]
    configs = (configured(implementation="triton"), CONFIG)
    programs = [compile_step_program(model, config) for config in configs]
    assert [site.fp8 for site in programs[0].call_sites] == [True] * 2 + [False] * 2
    engines = [sc.Engine(model, config, program=each) for config, each in zip(configs, programs, strict=True)]
    found, plain = (prompt_logits(engine, prompt) for engine in engines)
    assert apart(found, plain) < 0.1 * apart(plain, exact_logits(model, prompt))


def test_through_inductor() -> None:
    check_same("llama", compile=True)


def check_same(family: str, **changes: Any) -> None:
    """The logits of the same graph in the reference, without Inductor."""
    model = tiny(family, num_hidden_layers=1, initializer_range=0.2)
    found, plain = (prompt_logits(sc.Engine(model, config), PROMPT) for config in (configured(**changes), CONFIG))
    assert apart(found, plain) < 0.1 * apart(plain, exact_logits(model, PROMPT))
