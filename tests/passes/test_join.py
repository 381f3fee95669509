"""Linear layers on the same rows that become one product; and those that stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selective_compile as sc
from selective_compile import passes, programs
from selective_compile.backend import compile_step_program
from selective_compile.compiled_step import CompiledStep
from selective_compile.coverage.random_model import random_model, vocabulary_of
from selective_compile.joined_weights import JoinedWeights
from selective_compile.layered import Layered
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flatten import flatten
from selective_compile.passes.join import join
from selective_compile.passes.layer_cut import cut
from selective_compile.step_program import StepProgram
from selective_compile.tensor_state import states
from tests.exactness import TOLERANCE, engine_error
from tests.models import VOCABULARY, shallow, tiny
from tests.passes.graphs import WIDTH, analysed, flat_arguments, sample

CONFIG = sc.EngineConfig(compile=False, implementation="reference", fallback="refuse")
LENGTHS = (5, 1, 12, 3)


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def flat_of(function: Callable[..., Any], *weights: Tensor) -> FlatGraph:
    return flatten(analysed(function, *weights), paged=False)


def results(flat: FlatGraph, names: str = "x") -> Tensor:
    requests = [[sample(name, 1, length, seed=length) for name in names] for length in LENGTHS]
    arguments: list[Any] = flat_arguments(flat, requests, LENGTHS)
    weights = arguments[: len(flat.weights)]
    with torch.no_grad():
        operands = JoinedWeights(flat.joined).of(weights, states(weights))
        return flat.module(*arguments, *operands)[0]  # type: ignore[no-any-return]


def products(flat: FlatGraph) -> int:
    return sum(node.target is torch.ops.aten.linear.default for node in flat.module.graph.nodes)


def assert_joined(flat: FlatGraph, count: int, left: int, names: str = "x") -> None:
    """The same numbers, for rows of requests; so many products are left, and a second run joins none."""
    before = results(flat, names)
    assert join(flat) == count and products(flat) == left
    torch.testing.assert_close(results(flat, names), before)
    assert join(flat) == 0 and not flat.symbols.env.guards


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def test_gate_and_up() -> None:
    flat = flat_of(gated, drawn(12, WIDTH), drawn(12, WIDTH), drawn(WIDTH, 12))
    assert_joined(flat, 2, 2)
    assert flat.joined == ((0, 1),) and len(flat.example_inputs) == len(flat.weights) + len(flat.tokens) + 2
    (split,) = (node for node in flat.module.graph.nodes if node.target is torch.ops.aten.split_with_sizes.default)
    assert split.args[1:] == ([12, 12], -1)


def test_biases_go_along_and_those_without_stay_apart() -> None:
    def mixed(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, own: Tensor, its: Tensor) -> Tensor:
        sums = F.linear(x, a, own) * F.linear(x, b, its)
        return sums + F.linear(x, c) * F.linear(x, d) + F.linear(x, e)

    flat = flat_of(mixed, *(drawn(8, WIDTH) for _ in range(5)), drawn(8), drawn(8))
    assert_joined(flat, 5, 2)
    assert sorted(flat.joined) == [(0, 1), (2, 3, 4), (5, 6)]


def test_a_view_over_tokens_and_columns_is_made_of_the_part() -> None:
    def flattened(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        whole = F.linear(x, a).view(x.shape[0], x.shape[1] * 8).view(x.shape[0], x.shape[1], 8)
        return whole + F.linear(x, b)

    assert_joined(flat_of(flattened, drawn(8, WIDTH), drawn(8, WIDTH)), 2, 1)


def test_strides_are_those_that_the_graph_has_then() -> None:
    flat = flat_of(lambda x, a, b: F.linear(x, a).unflatten(-1, (2, 4)).sum(2) + F.linear(x, b), *some(2, 8, 4))
    assert join(flat) == 2
    kept = [node.meta["val"].stride()[-2:] for node in flat.module.graph.nodes if "getitem" in node.name]
    assert kept == [(12, 1), (12, 1)]
    (view,) = (node for node in flat.module.graph.nodes if node.target is torch.ops.aten.unflatten.int)
    assert view.meta["val"].stride()[1:] == (12, 4, 1)


def some(count: int, rows: int, last: int | None = None) -> list[nn.Parameter]:
    """Of so many rows each, the last one of others."""
    sizes = [rows] * (count - 1) + [last or rows]
    return [drawn(size, WIDTH) for size in sizes]


def two(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, a) * F.linear(x, b)


def test_what_lies_in_order_is_taken_as_it_is() -> None:
    """Though its memory is that of one tensor for all, as in an optimizer's."""
    whole = torch.randn(16, WIDTH)
    weights = [nn.Parameter(part) for part in whole.split(8)]
    addresses = [weight.data_ptr() for weight in weights]
    assert_joined(flat_of(two, *weights), 2, 1)
    assert [weight.data_ptr() for weight in weights] == addresses


def of_one_tensor(order: tuple[int, int]) -> list[Tensor]:
    parts = torch.randn(16, WIDTH).split(8)
    return [nn.Parameter(parts[place]) for place in order]


def of_the_same_memory() -> list[Tensor]:
    first, second = drawn(8, WIDTH), drawn(8, WIDTH)
    second.data = first.data
    return [first, second]


def in_inference_mode() -> list[Tensor]:
    with torch.inference_mode():
        return [drawn(8, WIDTH), drawn(8, WIDTH)]


class Own(nn.Parameter):
    """A class that may do something else with a product."""


@pytest.mark.parametrize(
    "weights",
    [
        lambda: of_one_tensor((1, 0)),
        of_the_same_memory,
        in_inference_mode,
        lambda: [drawn(8, WIDTH), nn.Parameter(torch.randn(WIDTH, 8).t())],
        lambda: [drawn(8, WIDTH), drawn(3, WIDTH)],
        lambda: [drawn(8, WIDTH), drawn(8, WIDTH).share_memory_()],
        lambda: [drawn(8, WIDTH), Own(torch.randn(8, WIDTH))],
    ],
    ids=("out_of_order", "same_memory", "inference", "by_columns", "odd_rows", "other_processes", "class_of_its_own"),
)
def test_weights_that_stay_where_they_are(weights: Callable[[], list[Tensor]]) -> None:
    own = weights()

    def summed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, a).sum(-1, keepdim=True) + F.linear(x, b)

    flat = flat_of(summed, *own)
    code, addresses = flat.module.code, [weight.data_ptr() for weight in own]
    assert join(flat) == 0 and flat.module.code == code and not flat.joined
    assert [weight.data_ptr() for weight in own] == addresses


@pytest.mark.parametrize(
    "hold", [Tensor.detach, lambda weight: weight.data[2:], lambda weight: weight.detach().numpy()]
)
def test_a_weight_whose_memory_somebody_holds_stays(hold: Callable[[Tensor], Any]) -> None:
    weights = some(2, 8)
    held = hold(weights[0])
    flat = flat_of(two, *weights)
    assert join(flat) == 0
    del held
    assert join(flat) == 2


def other_rows(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, a) + F.linear(y, b)


def tied(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, a) + F.linear(x, b) + b.sum()


def computed_weight(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, a) + F.linear(x, b * 2)


@pytest.mark.parametrize("function", [other_rows, tied, computed_weight])
def test_near_misses_are_left_alone(function: Callable[..., Tensor]) -> None:
    flat = flat_of(function, *some(2, 8))
    code = flat.module.code
    assert join(flat) == 0 and flat.module.code == code


@pytest.fixture
def left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Linear layers stay what they are, as on a GPU."""
    kept = [(name, rewrite) for name, rewrite in passes.REWRITES if name == "keep sampled rows"]
    monkeypatch.setattr(passes, "REWRITES", tuple(kept))
    monkeypatch.setattr(programs, "runs_triton", lambda *_: True)
    yield


def counts(program: Any) -> tuple[int, int]:
    """How many layers were joined, and how many attention calls rotate their own queries and keys."""
    found = {record.name: record.count for record in program.rewritten.records}
    return found["join"], found["fuse rotary"]


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", (5, 1)),
        ("qwen2", (5, 1)),  # with biases
        ("qwen3", (5, 1)),  # with norms of heads
        ("phi3", (0, 1)),  # joined as it comes
        ("gpt2", (0, 0)),  # of which no product is a linear layer
        ("gemma2", (10, 2)),
    ],
)
def test_logits_are_the_models_and_rotations_are_still_found(
    family: str, count: tuple[int, int], left_to_the_library: None
) -> None:
    model = tiny(family, **shallow(family))
    program = compile_step_program(model, CONFIG)
    assert isinstance(program, StepProgram) and counts(program) == count
    assert engine_error(model, vocabulary=VOCABULARY, lengths=(1, 2, 23, 7), chunk=5, program=program) < TOLERANCE


def test_layers_that_are_compiled_once_read_their_own_joined_weights(left_to_the_library: None) -> None:
    """All that a GPU's graph goes through, but for the compiler."""
    model = tiny("llama", num_hidden_layers=8, hidden_size=32, intermediate_size=48)
    program: Any = compile_step_program(model, CONFIG)
    assert counts(program) == (40, 8)
    flat, pieces = program._flat, cut(program._flat)
    assert pieces is not None and len(pieces.calls) >= 6
    layered = Layered(flat, pieces, lambda part, _: part.module.forward)
    program._run = CompiledStep(layered, flat.example_inputs, native=False)
    assert engine_error(model, vocabulary=VOCABULARY, lengths=(1, 2, 23, 7), chunk=5, program=program) < TOLERANCE


@pytest.mark.parametrize(("family", "count"), [("qwen2_moe", 10), ("deepseek_v3", 8)])
def test_experts_and_latents(family: str, count: int, left_to_the_library: None) -> None:
    """What is shared by all tokens of a mixture, without its gate of one column; the first maps of latents."""
    model = random_model(family)
    program = compile_step_program(model, CONFIG)
    assert isinstance(program, StepProgram) and counts(program)[0] == count
    error = engine_error(model, vocabulary=vocabulary_of(model), lengths=(1, 2, 23, 7), chunk=5, program=program)
    assert error < TOLERANCE


def test_on_a_cpu_and_where_it_is_not_wanted_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", num_hidden_layers=1)
    addresses = [weight.data_ptr() for weight in model.parameters()]
    assert compile_step_program(model, CONFIG).rewritten.flat.joined == ()  # type: ignore[union-attr]
    monkeypatch.setattr(passes, "REWRITES", passes.REWRITES[:2])
    without = sc.EngineConfig(compile=False, implementation="reference", join_weights=False)
    assert compile_step_program(model, without).rewritten.flat.joined == ()  # type: ignore[union-attr]
    invariant = sc.EngineConfig(compile=False, batch_invariant=True)
    assert compile_step_program(model, invariant).rewritten.flat.joined == ()  # type: ignore[union-attr]
    assert [weight.data_ptr() for weight in model.parameters()] == addresses
