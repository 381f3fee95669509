"""What `flatten` puts around a ragged attention to latents (`latents`): nodes of values ``[T, heads, size]``.

    query [T, H, D]          each head's own columns times its matrix: [T, H, r], then the others: the size of a row
    row   [T, 1, r + d]      the latent and what all heads share: key, and in its first r columns value
    mixed [T, H, r]          each head times its matrix: [T, H, Dv]

The weights stay where the model has them: their matrices are views of them, and nothing is multiplied beforehand.  On a
CPU the products go to a kernel that reads these views; on a GPU they are a library's, which Inductor then knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import Latent, PerHead
from selective_compile.passes.latents import begin_of

aten = torch.ops.aten


def latent_query(graph: fx.Graph, latent: Latent, query: fx.Node, heads: int, head_size: int) -> fx.Node:
    """``[T, H, row size]`` of ``[T, H, D]``."""
    at, end = latent.at, latent.at + latent.key.size
    own = times(graph, part(graph, query, 2, at, end), latent.key, heads, transposed=True)
    others = [part(graph, query, 2, *bounds) for bounds in ((0, at), (end, head_size)) if bounds[0] < bounds[1]]
    return joined(graph, [own, *others])


def latent_row(graph: fx.Graph, latent: Latent, rows: fx.Node, shared: list[fx.Node]) -> fx.Node:
    """``[T, 1, row size]`` of the latent ``[T, 1, r]`` and the tensors ``[T, n, 1]`` that the shared columns are in."""
    call = graph.call_function
    others = []
    for columns, tensor in zip(latent.shared, shared, strict=True):
        numbers = call(aten.transpose.int, (tensor, 1, 2))
        others.append(part(graph, numbers, 2, columns.first, columns.first + columns.size))
    return joined(graph, [rows, *others])


def latent_value(graph: fx.Graph, latent: Latent, mixed: fx.Node, heads: int) -> fx.Node:
    """``[T, H, Dv]`` of ``[T, H, r]``."""
    return times(graph, mixed, latent.value, heads, transposed=False)


def matrices(graph: fx.Graph, rows: PerHead, heads: int) -> fx.Node:
    """``[H, size, r]``, a view of the weight."""
    begin = begin_of(rows, heads)
    width = int(rows.weight.meta["val"].shape[1])
    pieces = part(graph, rows.weight, 0, begin, begin + heads * rows.step)
    of_heads = graph.call_function(aten.reshape.default, (pieces, [heads, rows.step, width]))
    return part(graph, of_heads, 1, rows.first - begin, rows.first - begin + rows.size)


def times(graph: fx.Graph, of_tokens: fx.Node, rows: PerHead, heads: int, *, transposed: bool) -> fx.Node:
    """``[T, H, n]`` times each head's matrix, or its transpose."""
    call, weights = graph.call_function, matrices(graph, rows, heads)
    if has_kernel(rows.weight):
        return call(torch.ops.selective.head_products.default, (of_tokens, weights, transposed))
    by_heads = call(aten.transpose.int, (of_tokens, 0, 1))
    product = call(aten.bmm.default, (by_heads, weights if transposed else call(aten.transpose.int, (weights, 1, 2))))
    return call(aten.transpose.int, (product, 0, 1))


def has_kernel(weight: fx.Node) -> bool:
    return bool(weight.meta["val"].device.type == "cpu")


def part(graph: fx.Graph, node: fx.Node, dim: int, begin: int, end: int) -> fx.Node:
    return graph.call_function(aten.slice.Tensor, (node, dim, begin, end))


def joined(graph: fx.Graph, parts: list[Any]) -> fx.Node:
    found: fx.Node = parts[0] if len(parts) == 1 else graph.call_function(aten.cat.default, (parts, 2))
    return found
