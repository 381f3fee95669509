"""Small graphs for pass tests: a function of token inputs and weights becomes a `TracedGraph`, without Dynamo."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from selective_compile.passes.attention import recognise_attention
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flatten import flatten
from selective_compile.passes.functional import make_functional
from selective_compile.passes.late_lookups import look_up_late
from selective_compile.passes.lengths import ends_of
from selective_compile.passes.mask_proof import prove_masks
from selective_compile.passes.normalise import Symbols, bounding, narrowings, tidy
from selective_compile.passes.refusals import Refusal, RefusedError, module_path
from selective_compile.passes.selections import recognise_selections
from selective_compile.passes.spellings import SPELT_OUT
from selective_compile.passes.token_axes import mark_token_axes
from selective_compile.passes.traced_graph import Input, Place, TracedGraph

WIDTH = 8
# The token inputs a function may name as parameters: trailing sizes and dtype.
TOKEN_INPUTS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "ids": ((), torch.int64),
    "mask": ((), torch.int64),
    "x": ((WIDTH,), torch.float32),
    "y": ((WIDTH,), torch.float32),
    "q": ((4, 8), torch.float32),
    "k": ((4, 8), torch.float32),
    "v": ((4, 8), torch.float32),
    "kv": ((2, 8), torch.float32),
}


def trace(function: Callable[..., Any], *weights: Tensor) -> TracedGraph:
    """The graph of ``function``, as pass 1 leaves it.

    Parameters that are named in `TOKEN_INPUTS` are token inputs, the others take ``weights``, those named ``buffer...``
    as buffers; one tensor or several are returned.  Raises `RefusedError`.
    """
    names = [name for name in inspect.signature(function).parameters if name in TOKEN_INPUTS]
    symbols = Symbols()
    with symbols.mode:
        batch, tokens = symbols.size("batch", 3), symbols.size("token", 12)
        fakes: list[Any] = [batch, tokens]
        fakes += [torch.empty([batch, tokens, *TOKEN_INPUTS[n][0]], dtype=TOKEN_INPUTS[n][1]) for n in names]
        fakes += [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype) for w in weights]

        def run(batch: Any, tokens: Any, *arguments: Any) -> Any:
            result = function(*arguments)
            return result if isinstance(result, tuple) else (result,)

        with torch.no_grad():
            module = make_fx(run, SPELT_OUT, tracing_mode="real", pre_dispatch=True)(*fakes)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    held = [name for name in inspect.signature(function).parameters if name not in TOKEN_INPUTS]
    sources = ["B", "S", *(f"L['{name}']" for name in names)]
    sources += [f"L['self'].{'_buffers' if n.startswith('buffer') else '_parameters'}['{n}']" for n in held]
    examples = [3, 12, *(sample(n, 3, 12) for n in names), *weights]
    places: list[Place] = ["size", "size", *["tokens"] * len(names), *["weight"] * len(weights)]  # type: ignore[list-item]
    inputs = [
        Input(index=i, node=node, source=source, place=place, example=example)
        for i, (node, source, place, example) in enumerate(zip(placeholders, sources, places, examples, strict=True))
    ]
    make_functional(module)
    tidy(module)
    look_up_late(module, symbols.mode)
    ends = ends_of(bounding(symbols))
    return TracedGraph(
        module=module,
        inputs=inputs,
        sizes=symbols.sizes(min(ends, default=None)),
        narrowings=narrowings(symbols),
        ends=list(ends),
    )


def sample(name: str, batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    sizes, dtype = TOKEN_INPUTS[name]
    if name == "mask":
        return torch.ones(batch, length, dtype=dtype)
    if dtype == torch.int64:
        return torch.randint(0, 16, (batch, length), generator=generator)
    return torch.randn(batch, length, *sizes, generator=generator)


def marked(function: Callable[..., Any], *weights: Tensor) -> TracedGraph:
    traced = trace(function, *weights)
    mark_token_axes(traced)
    return traced


def analysed(function: Callable[..., Any], *weights: Tensor) -> TracedGraph:
    """After passes 2 to 4."""
    return analyse(trace(function, *weights))


def analyse(traced: TracedGraph) -> TracedGraph:
    mark_token_axes(traced)
    recognise_selections(traced)
    recognise_attention(traced)
    prove_masks(traced)
    traced.refusals += traced.narrowings if not traced.refusals else []
    return traced


def as_on_a_gpu(graph: fx.Graph) -> None:
    """Wherever it names a device, it names one that may not be there."""

    def named(argument: Any) -> Any:
        return torch.device("cuda") if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), named)


def reasons(function: Callable[..., Any], *weights: Tensor) -> list[str]:
    """Why the function is refused, by any pass up to flattening; empty if it is not."""
    return [refusal.reason for refusal in refusals(function, *weights)]


def refusals(function: Callable[..., Any], *weights: Tensor) -> tuple[Refusal, ...]:
    try:
        flatten(analysed(function, *weights), paged=False)
    except RefusedError as error:
        return error.refusals
    return ()


def ragged_error(function: Callable[..., Any], *weights: Tensor, lengths: Sequence[int] = (5, 1, 12, 3)) -> float:
    """How far the flat graph over requests of these lengths is from the function on each alone.

    The first output must be ``[B, S, ...]``.  Raises `RefusedError`.
    """
    return error_of(flatten(analysed(function, *weights), paged=False), function, *weights, lengths=lengths)


def error_of(
    flat: FlatGraph, function: Callable[..., Any], *weights: Tensor, lengths: Sequence[int] = (5, 1, 12, 3)
) -> float:
    names = [name for name in inspect.signature(function).parameters if name in TOKEN_INPUTS]
    requests = [[sample(n, 1, length, seed=length) for n in names] for length in lengths]
    with torch.no_grad():
        alone = [function(*request, *weights) for request in requests]
        ours = flat.module(*flat_arguments(flat, requests, lengths))[0]
    alone = [a[0] if isinstance(a, tuple) else a for a in alone]
    assert ours.shape[1] == sum(lengths)
    return max(float((a - b).abs().max()) for a, b in zip(ours.split(list(lengths), dim=1), alone, strict=True))


def flat_arguments(flat: FlatGraph, requests: list[list[Tensor]], lengths: Sequence[int]) -> list[Tensor]:
    """Arguments of an unpaged flat graph."""
    arguments = [given.example for given in flat.weights]
    arguments += [torch.cat([request[given.index - 2] for request in requests], dim=1) for given in flat.tokens]
    if flat.uses_positions:
        arguments.append(torch.cat([torch.arange(length) for length in lengths]))
    arguments.append(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    return arguments  # type: ignore[return-value]


def written(graph: fx.Graph, inputs: Sequence[Input]) -> list[tuple[Any, ...]]:
    """Each node's operator, arguments, results and module, whatever the nodes are called; ``inputs`` come first."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    sources = [given.source for given in inputs]
    names = dict(zip(placeholders, [*sources, *(node.name for node in placeholders[len(sources) :])], strict=True))
    lines: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        if node.op != "placeholder":
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda given: names[given])
            values = [as_written(value) for value in tree_leaves(node.meta.get("val"))]
            names[node] = f"node {len(lines)}"
            lines.append((node.op, str(node.target), repr(arguments), values, module_path(node)))
    return lines


def as_written(value: Any) -> str:
    return str((value.shape, value.stride(), value.dtype)) if isinstance(value, Tensor) else str(value)
