"""The definition of every op, in plain eager PyTorch: slow, short, and what every kernel is tested against.

The functions have the schemas of `selective_compile.ops`. They compute in float32, or in float64 when they
are given float64 (which the ops do not take): that is the exact result the kernel tests compare with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """`selective::ragged_attention`: write this step's keys and values, then attend. Returns [T, H, Dv]."""
    written, block_size = slot_mapping >= 0, key_pool.shape[2]
    slots = slot_mapping[written]
    key_pool[slots // block_size, :, slots % block_size] = key[written]
    value_pool[slots // block_size, :, slots % block_size] = value[written]
    output = query.new_zeros(*query.shape[:2], value.shape[-1])
    bounds = cu_seqlens_q.tolist()
    for n, context in enumerate(context_lens.tolist()):
        rows = slice(bounds[n], bounds[n + 1])
        first = context - (rows.stop - rows.start)
        # Keys that every row's window leaves out are not read: their blocks may be gone.
        oldest = max(0, first - window + 1) if window > 0 else 0
        positions = torch.arange(oldest, context, device=query.device)
        blocks, offsets = block_table[n, positions // block_size].long(), positions % block_size
        keys, values = key_pool[blocks, :, offsets], value_pool[blocks, :, offsets]
        output[rows] = _attend(query[rows], keys, values, scale, window, softcap).to(query.dtype)
    return output


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, scale: float, window: int, softcap: float
) -> Tensor:
    """`selective::varlen_attention`: each request attends to its own rows alone. Returns [T, H, Dv]."""
    output = query.new_zeros(*query.shape[:2], value.shape[-1])
    bounds = cu_seqlens_q.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        rows = slice(begin, end)
        output[rows] = _attend(query[rows], key[rows], value[rows], scale, window, softcap).to(query.dtype)
    return output


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`selective::linear`: x [..., K], weight [N, K], bias [N] or None. Returns [..., N], x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Causal attention of a request's last positions [q, H, D] to its last [c, K, D], c >= q: [q, H, Dv]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(1, (key.shape[1], -1))
    score = torch.einsum("qkgd,ckd->kgqc", grouped, key.to(wide)) * scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    rows, columns = score.shape[-2:]
    columns_back = torch.arange(columns, device=query.device) - (columns - rows)
    distance = torch.arange(rows, device=query.device)[:, None] - columns_back
    hidden = distance < 0
    if window > 0:
        hidden |= distance >= window
    weights = score.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("kgqc,ckd->qkgd", weights, value.to(wide)).flatten(1, 2)
