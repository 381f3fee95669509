"""The definition of every op, in plain eager PyTorch: slow, short, and what every kernel is tested against.

The functions have the schemas of `selective_compile.ops`. They compute in float32, or in float64 when they
are given float64 (which the ops do not take): that is the exact result the kernel tests compare with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile import fp8_rows, int8_rows


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
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    prefix: int = 0,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """`selective::ragged_attention`: write this step's keys and values, then attend. Returns [T, H, Dv]."""
    written, block_size = slot_mapping >= 0, key_pool.shape[2]
    slots = slot_mapping[written]
    for pool, new, scales in ((key_pool, key[written], key_scales), (value_pool, value[written], value_scales)):
        pool[slots // block_size, :, slots % block_size] = _as_kept(new, pool, scales)
    output = query.new_zeros(*query.shape[:2], value.shape[-1])
    bounds = cu_seqlens_q.tolist()
    for n, context in enumerate(context_lens.tolist()):
        rows = slice(bounds[n], bounds[n + 1])
        # Keys that no row sees are not read: their blocks may be gone.
        oldest = _first_seen(context - (rows.stop - rows.start), window, chunk)
        positions = torch.arange(oldest, context, device=query.device)
        blocks, offsets = block_table[n, positions // block_size].long(), positions % block_size
        keys = _as_rows(key_pool[blocks, :, offsets], query, key_scales)
        values = _as_rows(value_pool[blocks, :, offsets], value, value_scales)
        chosen = None if selection is None else selection[rows]
        own_sinks, bias = of_rows(sinks, 2, rows), of_rows(distance_bias, 3, rows)
        options = (scale, window, softcap, chunk, own_sinks, slopes, chosen, prefix, bias)
        attended = _attend(query[rows], keys, values, positions, *options)
        output[rows] = attended.to(query.dtype)
    return output


def rotary_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    """`selective::rotary_attention`: norm and rotate queries and keys, then `ragged_attention`. Returns [T, H, Dv]."""
    return ragged_attention(*rotated_heads(query, key, *args[:9]), value, *args[9:])


def rotated_heads(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    first: int,
    rotated: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """The queries [T, H, D] and keys [T, K, D] that `selective::rotary_attention` attends with and writes."""
    d, half = torch.arange(rotated, device=query.device), rotated // 2
    pair, partner = (d // 2, d ^ 1) if interleaved else (d % half, (d + half) % rotated)
    sign = torch.where(partner > d, -1, 1)
    results = []
    for x, weight in ((query, query_weight), (key, key_weight)):
        head = x.to(torch.promote_types(x.dtype, torch.float32))
        if eps is not None:
            head = head * (head.square().mean(-1, keepdim=True) + eps).rsqrt()
        if weight is not None:
            head = head * (weight.to(head.dtype) + weight_offset)
        c, s = (t.to(head.dtype)[:, None, d if t.shape[1] == rotated else pair] for t in (cos, sin))
        turned = head[..., first : first + rotated]
        turned = turned * c + turned[..., partner] * sign * s
        results.append(torch.cat([head[..., :first], turned, head[..., first + rotated :]], dim=-1).to(x.dtype))
    return results[0], results[1]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    prefix: int = 0,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """`selective::varlen_attention`: each request attends to its own rows alone. Returns [T, H, Dv]."""
    output = query.new_zeros(*query.shape[:2], value.shape[-1])
    bounds = cu_seqlens_q.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        positions = torch.arange(end - begin, device=query.device)
        q, k, v = (tensor[begin:end] for tensor in (query, key, value))
        chosen = None if selection is None else selection[begin:end]
        own_sinks, bias = of_rows(sinks, 2, slice(begin, end)), of_rows(distance_bias, 3, slice(begin, end))
        options = (scale, window, softcap, chunk, own_sinks, slopes, chosen, prefix, bias)
        attended = _attend(q, k, v, positions, *options)
        output[begin:end] = attended.to(query.dtype)
    return output


def latent_attention(
    query: Tensor,
    key: Tensor,
    key_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    value_size: int,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    key_scales: Tensor | None = None,
    prefix: int = 0,
) -> Tensor:
    """`selective::latent_attention`: attention whose values are its keys, cut off. Returns [T, H, value_size]."""
    pools, metadata = (key_pool, key_pool), (cu_seqlens_q, context_lens, block_table, slot_mapping)
    options: Any = (scale, window, softcap, chunk, sinks, slopes, selection, key_scales, key_scales, prefix)
    return ragged_attention(query, key, key, *pools, *metadata, *options)[..., :value_size].contiguous()


def head_products(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """`selective::head_products`: each head's rows times its own matrix. [T, H, size], or transposed [T, H, r]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.einsum("thn,hnr->thr" if transposed else "thr,hnr->thn", x.to(wide), weight.to(wide)).to(x.dtype)


def ragged_top_keys(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    key_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    count: int,
) -> Tensor:
    """`selective::ragged_top_keys`: write this step's keys, then select the best of each row. [T, count] int32."""
    written, block_size = slot_mapping >= 0, key_pool.shape[2]
    slots = slot_mapping[written]
    key_pool[slots // block_size, :, slots % block_size] = key[written]
    selection = torch.full((len(query), count), -1, dtype=torch.int32, device=query.device)
    bounds = cu_seqlens_q.tolist()
    for n, context in enumerate(context_lens.tolist()):
        rows, positions = slice(bounds[n], bounds[n + 1]), torch.arange(context, device=query.device)
        keys = key_pool[block_table[n, positions // block_size].long(), :, positions % block_size]
        selection[rows] = _top_keys(query[rows], keys, weights[rows], scale, count)
    return selection


def varlen_top_keys(
    query: Tensor, key: Tensor, weights: Tensor, cu_seqlens_q: Tensor, scale: float, count: int
) -> Tensor:
    """`selective::varlen_top_keys`: each request selects among its own rows alone. [T, count] int32."""
    selection = torch.full((len(query), count), -1, dtype=torch.int32, device=query.device)
    bounds = cu_seqlens_q.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        q, k, w = (tensor[begin:end] for tensor in (query, key, weights))
        selection[begin:end] = _top_keys(q, k, w, scale, count)
    return selection


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`selective::linear`: x [..., K], weight [N, K], bias [N] or None. Returns [..., N], x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`selective::linears_int8` of one weight: int8 [N, K], scales [N] float32. Returns [..., N], x's dtype."""
    summed = F.linear(x.float(), weight.float()) * scales
    return (summed if bias is None else summed + bias.float()).to(x.dtype)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, scales: Tensor | None = None) -> Tensor:
    """`selective::grouped_linear`: x [S, K], weight [E, N, K], ends [E], scales [E, N] or None. Returns [S, N]."""
    result, begin = x.new_zeros((len(x), weight.shape[1])), 0
    for group, end in enumerate(ends.tolist()):
        if not begin <= end <= len(x):
            raise ValueError(f"ends must be in order and at most {len(x)}, got {ends.tolist()}")
        if begin < end:
            wide = weight[group].float() if scales is None else weight[group].float() * scales[group, :, None]
            result[begin:end] = F.linear(x[begin:end].float(), wide).to(x.dtype)
        begin = end
    return result


def group_rows(choice: Tensor, groups: int, cu_seqlens_q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`selective::group_rows`: choice [T, k]. Returns order [S], places [S] and ends [E] of the S = T * k rows."""
    used = 0 if cu_seqlens_q is None else int(cu_seqlens_q[-1])
    if 0 < used < len(choice):
        choice = torch.cat([choice[:used], choice[used - 1 : used].expand(len(choice) - used, -1)])
    chosen = choice.reshape(-1).clamp(max=groups)
    if bool((chosen < 0).any()):
        raise ValueError("groups must not be negative")
    order = chosen.argsort(stable=True)
    ends = chosen.bincount(minlength=groups + 1)[:groups].cumsum(0, dtype=torch.int32)
    return order, order.argsort(), ends


def of_rows(given: Tensor | None, dims: int, rows: slice) -> Tensor | None:
    """Those of these rows, of what has so many dimensions where rows have their own, and more than one row."""
    return given[rows] if given is not None and given.dim() == dims and len(given) > 1 else given


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int,
    sinks: Tensor | None,
    slopes: Tensor | None,
    selection: Tensor | None,
    prefix: int,
    distance_bias: Tensor | None,
) -> Tensor:
    """Attention of a request's last positions [q, H, D] to its keys [c, K, D] at `positions`, c >= q: [q, H, Dv]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    i, j = positions[len(key) - len(query) :, None], positions
    per_head = (key.shape[1], -1, 1, 1)
    score = torch.einsum("qkgd,ckd->kgqc", query.to(wide).unflatten(1, per_head[:2]), key.to(wide)) * scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    if slopes is not None:
        score = score + slopes.to(wide).reshape(per_head) * (j - i)
    if distance_bias is not None:
        biases = distance_bias.to(wide).expand(len(query), -1, -1).transpose(0, 1)  # [H, q, R]
        distance = (i - j).clamp(0, biases.shape[2] - 1).expand(len(biases), -1, -1)
        score = score + biases.gather(2, distance).unflatten(0, per_head[:2])
    hidden = (j > i) & (j >= prefix)
    if window > 0:
        hidden |= i - j >= window
    if chunk > 0:
        hidden |= j // chunk != i // chunk
    if selection is not None:
        ends = torch.where(selection < 0, len(key), selection).long()  # nothing selected: behind the last key
        hidden |= torch.ones(len(query), len(key) + 1, dtype=torch.bool, device=query.device).scatter(
            1, ends, torch.zeros_like(ends, dtype=torch.bool)
        )[:, :-1]
    score = score.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        own = sinks.to(wide).expand(len(query), -1).T.unflatten(0, per_head[:2])
        score = torch.cat([score, own[..., None]], dim=-1)
    weights = score.softmax(-1)[..., : len(key)]
    return torch.einsum("kgqc,ckd->qkgd", weights, value.to(wide)).flatten(1, 2)


def _as_kept(rows: Tensor, pool: Tensor, scales: Tensor | None) -> Tensor:
    """New rows [c, K, D] as a pool has them [c, K, ...]."""
    if scales is not None:
        return fp8_rows.quantised(rows, scales)
    return int8_rows.quantised(rows) if pool.dtype == torch.int8 else rows


def _as_rows(stored: Tensor, like: Tensor, scales: Tensor | None) -> Tensor:
    """Rows of a pool [c, K, ...] as numbers [c, K, D], D that of `like` [..., D]."""
    wide = torch.promote_types(like.dtype, torch.float32)
    if scales is not None:
        return fp8_rows.dequantised(stored, scales, wide)
    if stored.dtype != torch.int8:
        return stored
    return int8_rows.dequantised(stored, like.shape[-1], wide)


def _top_keys(query: Tensor, key: Tensor, weights: Tensor, scale: float, count: int) -> Tensor:
    """Of a request's last positions [q, H, D] the best of its keys [c, K, D], ascending, then -1: [q, count]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    i = torch.arange(len(key) - len(query), len(key), device=query.device)[:, None]
    overlap = torch.einsum("qkgd,ckd->qkgc", query.to(wide).unflatten(1, (key.shape[1], -1)), key.to(wide)) * scale
    score = torch.einsum("qh,qhc->qc", weights.to(wide), overlap.relu().flatten(1, 2))
    score = score.masked_fill(torch.arange(len(key), device=query.device) > i, -torch.inf)
    best = score.sort(dim=-1, descending=True, stable=True).indices[:, :count]  # of equal ones, those in front
    best = torch.where(best <= i, best, len(key)).sort(dim=-1).values
    selection = torch.full((len(query), count), -1, dtype=torch.int32, device=query.device)
    selection[:, : best.shape[1]] = torch.where(best < len(key), best, -1)
    return selection


def _first_seen(position: int, window: int, chunk: int) -> int:
    """The first position that a row at `position` sees."""
    in_window = position - window + 1 if window > 0 else 0
    in_chunk = position // chunk * chunk if chunk > 0 else 0
    return max(0, in_window, in_chunk)
