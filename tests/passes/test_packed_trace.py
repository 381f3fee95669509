"""Traces as plain data: the graph is what tracing would make it, and is taken for the same graph and inputs alone."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from selective_compile.capture import capture
from selective_compile.coverage.random_model import random_model
from selective_compile.model_call import ATTENTION_MASK
from selective_compile.passes import retrace as tracing
from selective_compile.passes import rewrite
from selective_compile.passes.normalise import Symbols
from selective_compile.passes.packed_trace import PackedTrace, asked_of
from selective_compile.passes.retrace import results_of
from selective_compile.passes.spellings import SPELT_OUT
from tests.models import tiny

FOUND = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "deepseek_v3")


class Traces:
    """In memory, as they would be on disk."""

    def __init__(self) -> None:
        self.written: dict[str, bytes] = {}

    def get(self, key: str) -> PackedTrace | None:
        found = self.written.get(key)
        return None if found is None else pickle.loads(found)

    def keep(self, key: str, trace: PackedTrace) -> None:
        self.written[key] = pickle.dumps(trace)


class Anything(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def told(module: fx.GraphModule, sources: dict[str, fx.Node]) -> list[Any]:
    nodes = list(module.graph.nodes)
    names = {node.name: sources[node.name].name for node in nodes if node.name in sources}
    return [names, *map(told_node, nodes)]


def told_node(node: fx.Node) -> Any:
    where = [node.meta.get(name) for name in ("stack_trace", "nn_module_stack", "source_fn_stack")]
    return node.op, node.name, node.target, str(node.args), str(node.kwargs), results_of(node), where


def spied(monkeypatch: pytest.MonkeyPatch, name: str) -> list[list[Any]]:
    """What `retrace` makes by that function, at once: passes change it."""
    found: list[list[Any]] = []
    whole = getattr(tracing, name)

    def noted(*arguments: Any) -> Any:
        found.append(told(*(result := whole(*arguments))))
        return result

    monkeypatch.setattr(tracing, name, noted)
    return found


@pytest.mark.parametrize("family", FOUND)
def test_what_is_found_is_what_tracing_would_make(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tiny(family), monkeypatch)


def test_of_experts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which call an operator of transformers'."""
    check(random_model("mixtral"), monkeypatch)


def check(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, unpacked = spied(monkeypatch, "traced_now"), spied(monkeypatch, "unpacked_trace")
    traces, captured = Traces(), capture(model)
    for _ in range(2):  # passes change no graph of Dynamo's
        found = rewrite(captured.module, captured.examples, paged=True, ones=ATTENTION_MASK, traces=traces)
        assert found.flat is not None and not found.flat.symbols.env.guards
    assert len(traced) == len(traces.written) == 2
    assert unpacked[2:] == unpacked[:2] == traced


def traced(function: Callable[..., Any], traces: Traces, *weights: Tensor) -> None:
    """Traces ``function`` of a ``[S, 4]`` tensor and ``weights``, called with proxies; what is kept is as traced."""
    graph, symbols = fx.Graph(), Symbols()
    given = [fx.Proxy(graph.placeholder(f"given_{i}")) for i in range(1 + len(weights))]
    graph.output((function(*given).node,))
    with symbols.mode:
        fakes = [
            torch.empty(symbols.size("token", 12), 4),
            *(torch.empty_strided(w.shape, w.stride(), dtype=w.dtype) for w in weights),
        ]
    arguments: Any = (fx.GraphModule(nn.Module(), graph), fakes, SPELT_OUT, symbols.mode)
    module = tracing.traced(*arguments, traces)[0]
    if traces.written:
        expected = tracing.traced_now(*arguments)[0]
        assert [*map(results_of, module.graph.nodes)] == [*map(results_of, expected.graph.nodes)]
        assert module.code == expected.code
        assert not asked_of(symbols.mode)


SAME = [
    lambda x: x * 2,
    lambda x: x * 2.0,
    lambda x: x * 3,
    lambda x: x + 2,
    lambda x: torch.add(x, 2),
    lambda x: x.add(2),
    lambda x: x.to(torch.float16),
    lambda x: x.to(torch.bfloat16),
    lambda x: x[:, 1:],
    lambda x: x[:, :-1],
    lambda x: x[:, 1:].reshape(-1),
    lambda x: x.split(2, dim=1)[1],
    lambda x: F.gelu(x),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.silu(x),
    lambda x: x * -0.0,
    lambda x: x * 0.0,
]


def test_graphs_that_are_not_the_same_are_traced_each() -> None:
    traces = Traces()
    for number, function in enumerate(SAME, 1):
        traced(function, traces)
        assert len(traces.written) == number
    for function in SAME:
        traced(function, traces)
    assert len(traces.written) == len(SAME)


def test_inputs_that_are_not_alike_are_traced_each() -> None:
    traces = Traces()
    others = [torch.empty(4), torch.empty(4, dtype=torch.float16), torch.empty(1), torch.empty(8)[::2]]
    for number, weight in enumerate(others, 1):
        traced(lambda x, w: x + w, traces, weight)
        assert len(traces.written) == number


def test_settings_of_the_process_count() -> None:
    traces = Traces()
    traced(lambda x: x * 2, traces)
    with torch.inference_mode():
        traced(lambda x: x * 2, traces)
    with torch.no_grad():
        traced(lambda x: x * 2, traces)
    assert len(traces.written) == 3


@functools.wraps(F.silu)
def other_silu(x: Tensor, inplace: bool = False) -> Tensor:
    return x * torch.sigmoid(x) + 1


def own_function(x: Tensor) -> Tensor:
    return x + 1


def of_torch_by_name(x: Tensor) -> Tensor:
    return x + 1


of_torch_by_name.__module__ = "torch.a_module_that_is_not_there"


def made(number: int) -> Callable[[Tensor], Tensor]:
    def add(x: Tensor) -> Tensor:
        return x + number

    add.__module__ = "torch.made"
    return add


def of_numbers(x: Any, numbers: list[float]) -> Any:
    return x.tracer.create_proxy("call_function", torch.tensor, (numbers,), {})


def test_a_few_numbers_in_the_code_are_kept_with_it() -> None:
    traces = Traces()
    for numbers in ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 5.0], []):
        for _ in range(2):
            traced(lambda x, numbers=numbers: x[:, : len(numbers)] + of_numbers(x, numbers), traces)
    found = [traces.get(key) for key in traces.written]
    constants = [tensor.tolist() for trace in found if trace is not None for _, tensor in trace.constants]
    assert constants == [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 5.0], []]


KEPT_OUT: dict[str, Callable[..., Any]] = {
    "a function of the user's": lambda x: x.tracer.create_proxy("call_function", own_function, (x,), {}),
    "what stands for one of PyTorch's": lambda x: x.tracer.create_proxy("call_function", other_silu, (x,), {}),
    "a function of a module that is not there": lambda x: x.tracer.create_proxy(
        "call_function", of_torch_by_name, (x,), {}
    ),
    "a size that was asked for": lambda x: x.expand(12, 4),
    "rows that values choose": lambda x: x[x > 0],
    "a complex view": lambda x: torch.view_as_complex(x.reshape(-1, 2, 2)).conj(),
    "a large table in the code": lambda x: x[:1, :1] + of_numbers(x, [1.0] * 100),
}


def test_functions_that_others_make_are_traced_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read alike, and may do something else."""
    monkeypatch.setitem(sys.modules, "torch.made", sys.modules[__name__])
    traces = Traces()
    for number in (1, 2):
        traced(lambda x, n=number: x.tracer.create_proxy("call_function", made(n), (x,), {}), traces)
    assert not traces.written


@pytest.mark.parametrize("name", KEPT_OUT)
def test_what_may_be_another_the_next_time_is_traced_each_time(name: str) -> None:
    traces = Traces()
    traced(KEPT_OUT[name], traces)
    assert not traces.written


def test_operators_of_others_are_traced_each_time() -> None:
    library = torch.library.Library("of_a_user", "FRAGMENT")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        traces = Traces()
        traced(lambda x: x.tracer.create_proxy("call_function", torch.ops.of_a_user.twice, (x,), {}), traces)
        assert not traces.written
    finally:
        library._destroy()


def test_under_a_mode_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    with Anything():
        traced(lambda x: x * 2, traces)
    assert not traces.written
