"""Where each token has the values of one in front of it, however that is written.

pad(x [B, S, C], [0, 0, 1, -1])
pad(x, [0, 0, 1, 0])[:, :-1]
cat([zeros [B, 1, C], x[:, :-1]], 1)
cat([linear(zeros), linear(x)[:, :-1]], 1)      is linear of such a shift
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
    """``[B, S, C]`` moved back by ``tokens``, with zeros in front, and then ``through`` a linear layer if there is one;
    ``first`` is the first node of what does it."""

    source: fx.Node
    tokens: int
    first: fx.Node
    through: fx.Node | None = None


def shift_of(node: fx.Node) -> Shift | None:
    """``pad(x, (0, 0, 1, -1))``, ``pad(x, (0, 0, 1, 0))[:, :-1]`` or ``cat([zeros, x[:, :-1]], 1)``."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        return None
    if [isinstance(size, int) for size in value.shape[1:]] != [False, True]:
        return None  # of something else than tokens, as of heads
    if node.target is aten.cat.default:
        return put_behind_zeros(node)
    cut = tokens_cut(node)
    padded: fx.Node = arguments_of(node)[0] if cut else node
    if padded.target not in PADS or (cut and list(padded.users) != [node]):
        return None
    front, behind = padding_along(padded, 1)
    return Shift(arguments_of(padded)[0], front, padded) if front > 0 and front == cut - behind else None


def put_behind_zeros(node: fx.Node) -> Shift | None:
    """Where as many zeros stand in front of the tokens as are left out at their end, or what a linear layer makes of
    zeros in front of what it makes of the tokens."""
    parts, dim = [*arguments_of(node), 0][:2]
    if dim not in (1, -2) or len(parts) != 2:
        return None
    front, cut = parts[0].meta["val"], tokens_cut(parts[1])
    alike = front.dtype == parts[1].meta["val"].dtype and isinstance(front.shape[1], int)
    if not (alike and cut and cut == front.shape[1]):
        return None
    source: fx.Node = arguments_of(parts[1])[0]
    if is_zeros(parts[0]):
        return Shift(source, cut, node)
    of_zeros, of_tokens = (arguments_of(each) for each in (parts[0], source))
    same = parts[0].target is source.target is aten.linear.default and of_zeros[1:] == of_tokens[1:]
    return Shift(of_tokens[0], cut, node, through=source) if same and is_zeros(of_zeros[0]) else None


def zeros_in_front(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """What zeros stand in front of along that dimension of three, 1 or 2, and how many; None if there are none."""
    if node.meta["val"].dim() != 3:
        return None
    if node.target in PADS:
        front, behind = padding_along(node, dim)
        return (arguments_of(node)[0], front) if front > 0 and behind == 0 else None
    if node.target is not aten.cat.default:
        return None
    parts, along = [*arguments_of(node), 0][:2]
    if along % 3 != dim or len(parts) != 2 or not is_zeros(parts[0]):
        return None
    zeros, rows = (part.meta["val"] for part in parts)
    front = zeros.shape[dim]
    return (parts[1], front) if zeros.dtype == rows.dtype and isinstance(front, int) and rows.dim() == 3 else None


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


def padding_along(node: fx.Node, dim: int) -> tuple[int, int]:
    """How many zeros a pad puts in front along that dimension of three and behind; (0, 0) if it is another pad."""
    _, amounts, *how = arguments_of(node)
    zeros = how in ([], [0], [0.0], ["constant"], ["constant", None], ["constant", 0], ["constant", 0.0])
    ends = [*amounts, 0, 0, 0, 0][:6]  # of the last dimension first
    front, behind = ends[2 * (2 - dim) :][:2]
    others = [amount for place, amount in enumerate(ends) if place // 2 != 2 - dim]
    if not zeros or node.kwargs or any(amount != 0 for amount in others):
        return 0, 0
    return (front, behind) if isinstance(front, int) and isinstance(behind, int) else (0, 0)
