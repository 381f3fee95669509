"""Passes 1 and 3 for recurrences: find short convolutions and known scans, and what is kept of a request between steps.

`whole_convolutions` (on the traced graph, before tokens are marked)::

    before:  conv1d(x [B, C, S], weight [C, 1, W], bias, padding=W - 1, groups=C) -> slice(2, 0, S)
    after:   selective.function([x, weight, bias], "causal convolution", [B, C, S])
    before:  pad(x [B, S, C], [0, 0, 1, -1])            or another shift (`shifts`)
    after:   selective.function([x, [[1, 0], ...]], "causal convolution", [B, S, C])

Linear attention is found by `linear_attention`, and left as such a node, too.

`recognise_recurrences` reads every `selective.function` into a `RecurrentCall`, which `flatten` replaces by the ragged
op.  Declines, with the node, where the function is not known or its tensors are not what they were in the trial.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.function_op import function
from selective_compile.passes.axes import Axis
from selective_compile.passes.recurrence_families import CAUSAL_CONV1D, LINEAR_ATTENTION, Family
from selective_compile.passes.recurrence_match import Recognised, Signature, TensorArgument
from selective_compile.passes.shifts import Shift, shift_of
from selective_compile.passes.traced_graph import (
    DTYPES,
    RecurrentCall,
    TokenTensor,
    TracedGraph,
    arguments_of,
    module_path,
    source_line,
)

aten = torch.ops.aten
DEFAULTS = (None, [1], [0], [1], 1)  # of a convolution: bias, stride, padding, dilation, groups
CONVOLUTION = CAUSAL_CONV1D.name


def whole_convolutions(traced: TracedGraph) -> int:
    """Causal depthwise convolutions, and shifts by some tokens, become one node each; returns how many."""
    found = 0
    for node in list(traced.graph.nodes):
        cut = causal_cut(node) if node.target is aten.conv1d.default else node
        if node.target is aten.conv1d.default and cut is not None:
            replace(traced, node, cut, convolution_tensors(traced, node), CONVOLUTION)
            found += 1
        elif (shift := shift_of(node)) is not None:
            replace(traced, shift.first, node, shift_tensors(traced, shift), CONVOLUTION)
            found += 1
    traced.graph.eliminate_dead_code()
    traced.module.recompile()
    return found


def replace(traced: TracedGraph, first: fx.Node, last: fx.Node, tensors: list[fx.Node], family: str) -> None:
    """By what ``family`` makes of the tensors: ``first`` to ``last``, which read nothing else."""
    value = last.meta["val"]
    with traced.graph.inserting_before(first):
        shape = [
            size if isinstance(size, int) else size_node(traced, tensors[0], dim)
            for dim, size in enumerate(value.shape)
        ]
        whole = traced.graph.call_function(function, (tensors, family, shape, value.dtype))
    whole.meta.update(last.meta)
    whole.meta["stack_trace"] = first.meta.get("stack_trace")
    last.replace_all_uses_with(whole)
    for node in dict.fromkeys((last, first)):
        traced.graph.erase_node(node)


def size_node(traced: TracedGraph, node: fx.Node, dim: int) -> fx.Node:
    size = traced.graph.call_function(aten.sym_size.int, (node, dim))
    size.meta["val"] = node.meta["val"].shape[dim]
    return size


def convolution_tensors(traced: TracedGraph, node: fx.Node) -> list[fx.Node]:
    x, weight, bias = (*node.args, None)[:3]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    with traced.graph.inserting_before(node):
        rows = traced.graph.call_function(aten.squeeze.dim, (weight, 1))
    rows.meta["val"] = weight.meta["val"].squeeze(1)
    return [tensor for tensor in (x, rows, bias) if isinstance(tensor, fx.Node)]


def shift_tensors(traced: TracedGraph, shift: Shift) -> list[fx.Node]:
    """A shift is a convolution that weighs the oldest of ``tokens + 1`` tokens by 1 and the others by 0."""
    value = shift.source.meta["val"]
    weight = torch.zeros(value.shape[2], shift.tokens + 1, dtype=value.dtype, device=value.device)
    weight[:, 0] = 1
    return [shift.source, register(traced, shift.first, f"shift_{shift.first.name}", weight)]


def register(traced: TracedGraph, before: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    """A constant of the graph."""
    traced.module.register_buffer(name, value)
    with traced.graph.inserting_before(before):
        constant = traced.graph.get_attr(name)
    constant.meta["val"] = value
    return constant


def causal_cut(node: fx.Node) -> fx.Node | None:
    """The slice that leaves of a depthwise convolution, padded on both sides, what looks back alone."""
    given = arguments_of(node)
    settings: list[Any] = [*given, *DEFAULTS[len(given) - 2 :]]
    x, weight, _, stride, padding, dilation, groups = settings
    channels, own, width = weight.meta["val"].shape
    depthwise = own == 1 and groups == channels == x.meta["val"].shape[1]
    plain = list(stride) == [1] and list(dilation) == [1] and list(padding) == [width - 1]
    users = list(node.users)
    if not (depthwise and plain and len(users) == 1 and users[0].target is aten.slice.Tensor):
        return None
    (cut,) = users
    bounds: list[Any] = [*arguments_of(cut), 0, None]
    dim, start = bounds[1:3]
    whole = str(cut.meta["val"].shape) == str(x.meta["val"].shape)
    return cut if dim in (2, -1) and start in (0, None) and whole else None


def recognise_recurrences(traced: TracedGraph) -> int:
    """Fill ``traced.recurrences``; returns how many there are."""
    for node in traced.graph.nodes:
        if node.target is not function or node not in traced.axes:
            continue
        tensors, name = arguments_of(node)[:2]
        known = READ[name](tensors, node) if name in READ else traced.functions.get(name)
        if known is None:
            traced.refuse(node, "it is no recurrence that is known")
            continue
        if (dtype := node.meta["val"].dtype) not in DTYPES:
            traced.refuse(node, f"rows of a recurrence must be of one of {DTYPES}, got {dtype}")
            continue
        wrong = unlike(traced, tensors, known)
        if wrong is not None:
            traced.refuse(wrong, "it is not laid out by tokens as the recurrence that reads it was when recognised")
            continue
        traced.recurrences.append(read_call(traced, node, tensors, known))
        traced.sequence_nodes.pop(node)
    return len(traced.recurrences)


def convolution_of(tensors: list[fx.Node], node: fx.Node) -> Recognised:
    value = node.meta["val"]
    channels, width = tensors[1].meta["val"].shape
    # Which of the last two dimensions is the channels: the other is a symbol.
    dim = 2 if isinstance(value.shape[1], int) else 1
    shape = (1, channels, 0) if dim == 2 else (1, 0, channels)
    shapes = (shape, (channels, width), (channels,))
    letters = {"C": channels, "W": width, "P": width - 1}
    return in_order(CAUSAL_CONV1D, tensors, node, shapes, shape, dim, letters)


def linear_attention_of(tensors: list[fx.Node], node: fx.Node) -> Recognised:
    (_, heads, _, keys), (_, _, _, values) = (tensors[place].meta["val"].shape for place in (1, 2))
    row, result = (1, heads, 0, keys), (1, heads, 0, values)
    letters = {"H": heads, "P": values, "N": keys}
    return in_order(LINEAR_ATTENTION, tensors, node, (row, row, result, (heads,)), result, 2, letters)


READ = {CONVOLUTION: convolution_of, LINEAR_ATTENTION.name: linear_attention_of}


def in_order(
    family: Family,
    tensors: list[fx.Node],
    node: fx.Node,
    shapes: tuple[tuple[int, ...], ...],
    result: tuple[int, ...],
    token_dim: int,
    letters: dict[str, int],
) -> Recognised:
    """``node`` is what ``family`` makes of the tensors, which are its roles in their order, with tokens all in one
    dimension; 0 stands for how many there are."""
    dtypes = [tensor.meta["val"].dtype for tensor in tensors]
    arguments = tuple(
        TensorArgument(name=role.name, shape=shape, dtype=dtype, token_dim=token_dim if role.per_token else None)
        for role, shape, dtype in zip(family.roles, shapes, dtypes, strict=False)
    )
    value = node.meta["val"]
    return Recognised(
        family=family,
        roles=tuple((argument.name, place) for place, argument in enumerate(arguments)),
        options=(),
        signature=Signature(
            tensors=arguments,
            constants=(),
            result=TensorArgument(name="", shape=result, dtype=value.dtype, token_dim=token_dim),
            returned=None,
            device=value.device,
        ),
        letters=tuple(letters.items()),
    )


def unlike(traced: TracedGraph, tensors: list[fx.Node], known: Recognised) -> fx.Node | None:
    """The first tensor whose tokens do not lie where they lay in the trial."""
    for node, expected in zip(tensors, known.signature.tensors, strict=True):
        axes = traced.axes.get(node)
        if axes is None or axes.opaque or axes.is_permuted:
            return node
        if expected.token_dim is None:
            fits = axes.is_constant and tuple(node.meta["val"].shape) == expected.shape
        else:
            fits = all(
                dim == (Axis.TOKEN,) if place == expected.token_dim else place == 0 or not axes.labelled(place)
                for place, dim in enumerate(axes.dims)
            ) and axes.dims[0] in ((), (Axis.BATCH,))
        if not fits:
            return node
    return None


def read_call(traced: TracedGraph, node: fx.Node, tensors: list[fx.Node], known: Recognised) -> RecurrentCall:
    result = known.signature.result
    assert result.token_dim is not None
    described = known.signature.tensors
    return RecurrentCall(
        name=call_name(traced, node),
        family=known.family.name,
        run=known.family.run,
        output=node,
        output_token_dim=result.token_dim,
        tensors={role: TokenTensor(node=tensors[at], token_dim=described[at].token_dim) for role, at in known.roles},
        options=dict(known.options),
        state_shape=known.state_shape(),
        state_dtype=node.meta["val"].dtype if known.family is CAUSAL_CONV1D else torch.float32,
        source_line=source_line(node),
        unlimited_steps=known.unlimited_steps,
    )


def call_name(traced: TracedGraph, node: fx.Node) -> str:
    path = module_path(node) or "recurrence"
    taken = sum(call.name.split("#")[0] == path for call in traced.recurrences)
    return f"{path}#{taken + 1}" if taken else path
