"""Passes 1 and 3 for recurrences: one node stands for all of one, and what is kept of a request between steps is read.

Those of a graph are found before tokens are marked, by `convolutions` and `linear_attention`, and one node, a
`selective.function` of their tensors, takes their place (`whole`); what capture left whole is such a node already.

`recognise_recurrences` reads every `selective.function` into a `RecurrentCall`, which `flatten` replaces by the ragged
op.  Declines, with the node, where the function is not known or its tensors are not what they were in the trial.
"""

from __future__ import annotations

import torch
from torch import fx

from selective_compile.function_op import function
from selective_compile.passes.axes import Axis
from selective_compile.passes.long_form import call
from selective_compile.passes.recurrence_families import CAUSAL_CONV1D, LINEAR_ATTENTION, Family
from selective_compile.passes.recurrence_match import Recognised, Signature, TensorArgument
from selective_compile.passes.refusals import module_path, source_line
from selective_compile.passes.traced_graph import DTYPES, RecurrentCall, TokenTensor, TracedGraph, arguments_of

aten = torch.ops.aten
CONVOLUTION = CAUSAL_CONV1D.name


def whole(traced: TracedGraph, tensors: list[fx.Node], family: str, *, shaped: fx.Node, like: fx.Node) -> fx.Node:
    """What ``family`` makes of the tensors, of the shape and type of ``shaped``, from the place in the user's code that
    ``like`` is from; as many requests and tokens as ``tensors[0]`` has."""
    value = shaped.meta["val"]
    shape = [
        size if isinstance(size, int) else call(aten.sym_size.int, tensors[0], dim, like=tensors[0])
        for dim, size in enumerate(value.shape)
    ]
    node = traced.graph.call_function(function, (tensors, family, shape, value.dtype))
    node.meta = dict(like.meta) | {"val": value}
    return node


def register(traced: TracedGraph, name: str, value: torch.Tensor) -> fx.Node:
    """A constant of the graph."""
    traced.module.register_buffer(name, value)
    constant = traced.graph.get_attr(name)
    constant.meta["val"] = value
    return constant


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
