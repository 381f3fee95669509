"""Where each token has the values of one in front of it, however that is written.

pad(x [B, S, C], [0, 0, 1, -1])
pad(x, [0, 0, 1, 0])[:, :-1]
cat([zeros [B, 1, C], x[:, :-1]], 1)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from selective_compile.passes.traced_graph import arguments_of

aten = torch.ops.aten
PADS = (aten.pad.default, aten.constant_pad_nd.default)


@dataclass(frozen=True)
class Shift:
    """``[B, S, C]`` moved back by ``tokens``, with zeros in front; ``first`` is the first node of what does it."""

    source: fx.Node
    tokens: int
    first: fx.Node


def shift_of(node: fx.Node) -> Shift | None:
    """``pad(x, (0, 0, 1, -1))``, ``pad(x, (0, 0, 1, 0))[:, :-1]`` or ``cat([zeros, x[:, :-1]], 1)``."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 3 or not isinstance(value.shape[2], int):
        return None
    if node.target is aten.cat.default:
        return put_behind_zeros(node)
    cut = tokens_cut(node)
    padded: fx.Node = arguments_of(node)[0] if cut else node
    if padded.target not in PADS or (cut and list(padded.users) != [node]):
        return None
    front, behind = padding_of_tokens(padded)
    return Shift(arguments_of(padded)[0], front, padded) if front > 0 and front == cut - behind else None


def put_behind_zeros(node: fx.Node) -> Shift | None:
    """Where as many zeros stand in front of the tokens as are left out at their end."""
    parts, dim = [*arguments_of(node), 0][:2]
    if dim not in (1, -2) or len(parts) != 2 or not is_zeros(parts[0]):
        return None
    zeros, cut = parts[0].meta["val"], tokens_cut(parts[1])
    alike = zeros.dtype == parts[1].meta["val"].dtype and isinstance(zeros.shape[1], int)
    return Shift(arguments_of(parts[1])[0], cut, node) if alike and cut and cut == zeros.shape[1] else None


def is_zeros(node: fx.Node) -> bool:
    packet, given = getattr(node.target, "overloadpacket", None), arguments_of(node)
    filled = packet in (aten.full, aten.full_like, aten.new_full) and given[2 if packet is aten.new_full else 1] == 0
    return filled or packet in (aten.zeros, aten.zeros_like, aten.new_zeros)


def tokens_cut(node: fx.Node) -> int:
    """How many tokens a slice leaves out at the end of ``[B, S, C]``; 0 if it is none, or does something else."""
    given = arguments_of(node)
    if node.target is not aten.slice.Tensor or node.kwargs or len(given) != 4 or given[1] not in (1, -2):
        return 0
    start, end = given[2:]
    return -end if start in (0, None) and isinstance(end, int) and end < 0 else 0


def padding_of_tokens(node: fx.Node) -> tuple[int, int]:
    """How many zeros a pad puts in front of the tokens of ``[B, S, C]`` and behind; (0, 0) if it is another pad."""
    _, amounts, *how = arguments_of(node)
    zeros = how in ([], [0], [0.0], ["constant"], ["constant", None], ["constant", 0], ["constant", 0.0])
    if not zeros or node.kwargs or len(amounts) != 4 or list(amounts[:2]) != [0, 0]:
        return 0, 0
    front, behind = amounts[2:]
    return (front, behind) if isinstance(front, int) and isinstance(behind, int) else (0, 0)
