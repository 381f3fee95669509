"""Modules that cannot be captured, but treat tokens independently, run once a step; the model around them is ragged."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import selective_compile as sc
from selective_compile.backend import compile_step_program, report_of
from selective_compile.module_program import ModuleProgram
from selective_compile.skeleton import structure_of
from selective_compile.whole_modules import ModulesOf
from tests.decoders import VOCABULARY, WIDTH, Decoder
from tests.exactness import TOLERANCE, logits_in_chunks
from tests.models import tiny
from tests.oracle import assert_same_tokens
from tests.runtime.played_stream import TapedStream

EXPERTS, CHOSEN = 4, 2
CONFIG = sc.EngineConfig(compile=False, token_budget=24, block_size=8, max_kv_tokens=8 * 10)


class Experts(nn.Module):
    """Which experts are computed depends on the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN)
        mask = torch.nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(rows)
        for hit in (mask.sum((-1, -2)) > 0).nonzero():
            expert = int(hit.item())
            places, found = torch.where(mask[expert])
            if found.numel() == 0:
                continue
            out.index_add_(0, found, self.compute(rows[found], expert) * weights[found, places, None])
        return out.view(x.shape)

    def compute(self, rows: Tensor, expert: int) -> Tensor:
        return (rows @ self.weights[expert]).relu()


class PutBack(Experts):
    """Sorted by expert, sliced at sizes that the host reads, and put back, as DeepSeek's code for inference does."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN)
        order, start, parts = chosen.view(-1).argsort(), 0, []
        ordered = rows[order // CHOSEN]
        for expert, size in enumerate(chosen.flatten().bincount().cpu().numpy()):
            if size == 0:
                continue
            parts.append(self.compute(ordered[start : start + size], expert))
            start += size
        results = torch.cat(parts)
        back = torch.empty_like(results)
        back[order] = results
        return (back.view(*chosen.shape, -1) * weights[..., None]).sum(1).view(x.shape)


class Added(Experts):
    """Added to the rows that a mask finds, as Mistral's own code does."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN)
        out = torch.zeros_like(rows)
        for expert in range(EXPERTS):
            if not (chosen == expert).any():
                continue
            found, places = torch.where(chosen == expert)
            out[found] += self.compute(rows[found], expert) * weights[found, places, None]
        return out.view(x.shape)


class Unique(Experts):
    """Of the experts that some token chose, as courses have it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN)
        out = torch.zeros_like(rows)
        for expert in torch.unique(chosen):
            found, places = torch.where(chosen == expert)
            out.index_add_(0, found, self.compute(rows[found], int(expert)) * weights[found, places, None])
        return out.view(x.shape)


class Normalised(Experts):
    """An expert that sees which other tokens chose it."""

    def compute(self, rows: Tensor, expert: int) -> Tensor:
        return super().compute(rows - rows.mean(0), expert)


class Counting(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Balanced(Experts):
    """Leaves how the tokens are spread for who trains it, and asks in a call what it has left there itself."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: Any = None

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        self.loads, self.loss = probabilities.flatten(0, -2).mean(0), 0.0
        if self.loads is not None:
            self.loss = self.loads.square().sum()
        return super().forward(x)


class Sparse(Decoder):
    def __init__(self, kind: type[nn.Module] = Experts) -> None:
        super().__init__(layers=2)
        self.experts = nn.ModuleList([kind() for _ in self.blocks])
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        mask = self.mask(input_ids, attention_mask)
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = x + experts(block(x, mask))
        return self.head(self.norm(x))


@functools.cache
def compiled() -> tuple[Sparse, ModuleProgram]:
    """Tests share a model: none changes a weight of it."""
    torch.manual_seed(0)
    model = Sparse()
    program = compile_step_program(model, sc.EngineConfig(compile=False, fallback="refuse"))
    assert type(program) is ModuleProgram
    return model, program


def prompts(count: int = 6) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 40))] for _ in range(count)]


def test_the_verdict_is_ragged_and_names_the_modules() -> None:
    model, program = compiled()
    report = report_of(program, model)
    assert report.ok and not report.isolated and not report.refusals
    assert report.called_once == ("experts.0", "experts.1") and len(report.calls) == 2
    assert "2 modules run as they are, once over the tokens of all requests" in str(report)
    assert json.loads(report.to_json())["called_once"] == ["experts.0", "experts.1"]
    assert "x = x + experts(block(x, mask))" in str(report) and "source line unknown" not in str(report)


def test_its_steps_are_not_captured_and_the_modules_are_named() -> None:
    model, program = compiled()
    stream = TapedStream(captures=True)
    engine = sc.Engine(model, CONFIG, program=program, stream=stream)
    request = engine.submit([5, 7, 9], max_new_tokens=4)
    assert_same_tokens(model, [5, 7, 9], list(request.result().tokens))
    assert stream.captured == 0 and program.not_captured.endswith("runs in each step: experts.0, experts.1")


def test_logits_are_the_models_own() -> None:
    model, program = compiled()
    for prompt, logits in zip(prompts(), logits_in_chunks(program, prompts(), chunk=5), strict=True):
        with torch.no_grad():
            assert float((model(torch.tensor([prompt]))[0] - logits).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kind", [PutBack, Added, Unique])
def test_other_loops_run_once_too(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Sparse(kind)
    program = compile_step_program(model, sc.EngineConfig(compile=False, fallback="refuse"))
    assert type(program) is ModuleProgram
    for prompt, logits in zip(prompts(), logits_in_chunks(program, prompts(), chunk=5), strict=True):
        with torch.no_grad():
            assert float((model(torch.tensor([prompt]))[0] - logits).abs().max()) < TOLERANCE


def test_requests_preempted_or_with_a_common_prefix_get_the_same_tokens() -> None:
    model, program = compiled()
    engine = sc.Engine(model, CONFIG, program=program)
    common = list(range(1, 18))
    given = [[*common, n] for n in range(4)] + prompts(4)
    requests = []
    for prompt in given:
        requests.append(engine.submit(prompt, max_new_tokens=10))
        engine.step()
    for prompt, request in zip(given, requests, strict=True):
        assert_same_tokens(model, prompt, request.result().tokens)
    assert engine.stats().preemptions > 0 and engine.stats().tokens_reused > 0


def test_compiled_by_inductor() -> None:
    model, _ = compiled()
    engine = sc.Engine(model, sc.EngineConfig(token_budget=16, max_kv_tokens=256))
    requests = [engine.submit(prompt, max_new_tokens=4) for prompt in ([5, 7, 9], [11], list(range(20)))]
    for prompt, request in zip(([5, 7, 9], [11], list(range(20))), requests, strict=True):
        assert_same_tokens(model, prompt, request.result().tokens)


def test_a_weight_of_such_a_module_is_used_from_the_next_step_on() -> None:
    model = Sparse()
    engine = sc.Engine(model, CONFIG)
    request = engine.submit([5, 7, 9], max_new_tokens=8)
    for _ in range(4):
        engine.step()
    before = list(request.tokens)
    with torch.no_grad():
        model.experts[0].weights.neg_()
    tokens = list(request.result().tokens)
    assert_same_tokens(model, [5, 7, 9, *before], tokens[len(before) :])


def test_a_fused_step_of_such_modules_alone_is_a_change_of_the_weights() -> None:
    model = Sparse()
    program = compile_step_program(model, CONFIG)
    before = program.weights_version()
    optimizer = torch.optim.AdamW(model.experts.parameters(), fused=True)
    for weight in model.experts.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert program.weights_version() != before


class Object:
    factor = -2.0


ATTRIBUTES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "a tensor": (torch.tensor(1.0), lambda own: setattr(own, "given", torch.tensor(-2.0))),
    "an object": (SimpleNamespace(factor=1.0), lambda own: setattr(own, "given", Object())),
    "a list of objects": ([SimpleNamespace(factor=1.0)], lambda own: setattr(own, "given", [Object()])),
    "none any more": (Object(), lambda own: delattr(own, "given")),
}


class Reading(Experts):
    """Multiplies by an attribute, whatever that is."""

    def forward(self, x: Tensor) -> Tensor:
        given: Any = getattr(self, "given", 1.0)
        given = given[0] if isinstance(given, list) else given
        return super().forward(x) * getattr(given, "factor", given)


@pytest.mark.parametrize("given", ATTRIBUTES)
def test_an_attribute_of_such_a_module_is_used_from_the_next_step_on(given: str) -> None:
    model = Sparse(Reading)
    own = model.experts[0]
    own.given, change = ATTRIBUTES[given]
    engine = sc.Engine(model, CONFIG)
    before = engine.submit([5, 7, 9], max_new_tokens=6).result().tokens
    assert_same_tokens(model, [5, 7, 9], before)
    change(own)
    after = engine.submit([5, 7, 9], max_new_tokens=6).result().tokens
    assert_same_tokens(model, [5, 7, 9], after)
    assert after != before


@pytest.mark.parametrize(("kind", "fallback"), [(Normalised, "refuse"), (Normalised, "isolated"), (Counting, "refuse")])
def test_what_leaks_or_counts_is_refused(kind: type[nn.Module], fallback: Any) -> None:
    with pytest.raises(sc.RefusedError, match="graph capture"):
        compile_step_program(Sparse(kind), sc.EngineConfig(compile=False, fallback=fallback))


def test_what_counts_is_not_called_for_all_requests_at_once() -> None:
    program = compile_step_program(Sparse(Counting), sc.EngineConfig(compile=False, fallback="isolated"))
    assert list(program.isolated) == ["experts.0", "experts.1"]


@torch.no_grad()
def test_what_is_set_before_it_is_read_is_left_nowhere() -> None:
    torch.manual_seed(0)
    model = Sparse(Balanced)
    for _ in ("not called yet", "called"):
        left = model.experts[0].loads
        program = compile_step_program(model, sc.EngineConfig(compile=False, fallback="refuse"))
        assert type(program) is ModuleProgram
        found = logits_in_chunks(program, prompts(), 5)
        assert model.experts[0].loads is left
        assert "4 attributes that the forward sets and never reads" in str(report_of(program, model))
        for prompt, logits in zip(prompts(), found, strict=True):
            assert torch.allclose(logits, model(torch.tensor([prompt]))[0], atol=1e-4)


def test_its_products_depend_on_the_batch() -> None:
    model, program = compiled()
    with pytest.raises(ValueError, match=r"batch_invariant must be False for products.*isolated_rows"):
        sc.Engine(model, sc.EngineConfig(compile=False, batch_invariant=True), program=program)


def test_modules_are_alike_if_only_weights_differ() -> None:
    model, _ = compiled()
    modules = ModulesOf(model)
    assert modules.likeness("experts.0") == modules.likeness("experts.1")
    other = Sparse()
    other.experts[1] = Counting()
    other.experts[0].extra = 3
    modules = ModulesOf(other)
    assert len({modules.likeness(path) for path in ("experts.0", "experts.1", "blocks.0")}) == 3


class Folding(nn.Linear):
    """Gives its weight other memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data - x.sum()
        return x


def test_a_weight_that_a_trace_has_given_no_memory_has_its_own_again() -> None:
    model = Sparse()
    model.router = Folding(2, 2)
    before = model.router.weight.detach().clone()
    structure = structure_of([(torch.ones(1, 2),), {}], [])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        rows = mode.from_tensor(torch.ones(1, 2))
        found = ModulesOf(model).run("router", structure, [rows])
    assert len(found) == 1 and torch.equal(model.router.weight.detach(), before)


class Doubled(Experts):
    def compute(self, rows: Tensor, expert: int) -> Tensor:
        return 2 * super().compute(rows, expert)


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def test_another_class_is_compiled_anew_for_prompts_of_embeddings_too() -> None:
    model = tiny("llama", num_hidden_layers=1)
    torch.manual_seed(0)
    model.model.layers[0].mlp = Experts()
    assert sc.explain(model).called_once
    embeddings = model.get_input_embeddings()(torch.tensor([[5, 6, 7, 9]])).detach()
    asked: dict[str, Any] = {"inputs_embeds": embeddings, "max_new_tokens": 6, "do_sample": False}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    for kind in (nn.Linear, Negated):
        model.model.layers[0].mlp.router.__class__ = kind
        found, alone = sc.generate(model, engine_config=CONFIG, **asked), model.generate(**asked)
        torch.testing.assert_close(found.logits[0], alone.logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["of the module", "of a part of it", "parametrised"])
def test_another_class_is_compiled_anew_and_refused_by_an_engine(change: str) -> None:
    torch.manual_seed(0)
    model = Sparse()
    program = compile_step_program(model, sc.EngineConfig(compile=False))
    engine = sc.Engine(model, CONFIG, program=program)
    assert program.is_of(model) and len(engine.submit([1, 2, 3], max_new_tokens=2).result().tokens) == 2
    experts = model.experts[0]
    if change == "of the module":
        experts.__class__ = Doubled
    elif change == "of a part of it":
        experts.router.__class__ = Negated
    else:
        torch.nn.utils.parametrizations.weight_norm(experts.router)
    assert not program.is_of(model)
    told = engine.submit([1, 2, 3], max_new_tokens=2).result().error
    assert told is not None and "the model must stay as it was compiled" in told and "must stay" in told
    assert "Experts" in told or "a module that runs by itself must stay a Linear, got a" in told
