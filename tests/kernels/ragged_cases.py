"""Steps for the tests of the ragged attention kernels: a `Case` has sizes, `make_inputs` draws tensors."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from selective_compile import fp8_rows, int8_rows, reference

SCALES = ("key_scales", "value_scales")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: `requests` are (rows in this step, tokens already in the pool)."""

    name: str
    requests: tuple[tuple[int, int], ...]
    query_heads: int = 4
    kv_heads: int = 2
    key_size: int = 16
    value_size: int = 16
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0
    prefix: int = 0
    sinks: float | None = None  # about where the sinks lie; the scores lie around 0
    row_sinks: bool = False  # rows have their own
    slopes: bool = False
    distances: int = 0  # that biases are given for, of each row, or below 0 of all rows
    scale: float = 0.3
    padding_rows: int = 0
    strided: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of `selective::ragged_attention`, in the schema's order."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_pool: Tensor
    value_pool: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    scale: float
    window: int
    softcap: float
    chunk: int
    sinks: Tensor | None
    slopes: Tensor | None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    prefix: int = 0
    distance_bias: Tensor | None = None

    def ragged(self) -> tuple:
        return self._given(skipped=(), rest=(self.key_scales, self.value_scales, self.prefix, self.distance_bias))

    def varlen(self) -> tuple:
        skipped = ("key_pool", "value_pool", "context_lens", "block_table", "slot_mapping")
        return self._given(skipped=skipped, rest=(self.prefix, self.distance_bias))

    def _given(self, skipped: tuple[str, ...], rest: tuple) -> tuple:
        """Without what is not there of the rest, in front of which is no selection."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in skipped]
        given = tuple(getattr(self, name) for name in names[: names.index("slopes") + 1])
        there = max((place for place, value in enumerate(rest, 1) if isinstance(value, Tensor) or value), default=0)
        return (*given, None, *rest[:there]) if there else given

    def to(self, dtype: torch.dtype) -> Inputs:
        """A copy with its own pools; what is drawn in one dtype can be checked in another. Pools of 8 bits stay."""
        tensors = {name: getattr(self, name) for name in ("query", "key", "value", "key_pool", "value_pool")}
        if self.distance_bias is not None:
            tensors["distance_bias"] = self.distance_bias
        kinds = {name: tensor.dtype if tensor.dtype.itemsize == 1 else dtype for name, tensor in tensors.items()}
        return dataclasses.replace(
            self, **{name: tensor.to(kinds[name], copy=True) for name, tensor in tensors.items()}
        )

    def with_int8_pools(self) -> Inputs:
        """The same step with pools of int8 rows; what may not be read has NaN for its scale."""
        pools = {name: int8_rows.quantised(getattr(self, name)) for name in ("key_pool", "value_pool")}
        return dataclasses.replace(self, **pools)

    def with_fp8_pools(self) -> Inputs:
        """The same step with pools of e4m3; a scale for each head, with which the largest numbers are cut."""
        generator = torch.Generator().manual_seed(7)
        scales = {name: 0.005 + 0.02 * torch.rand(self.key.shape[1], generator=generator) for name in SCALES}
        pools = {}
        for name, given in zip(("key_pool", "value_pool"), scales.values(), strict=True):
            pools[name] = fp8_rows.quantised(getattr(self, name).transpose(1, 2), given).transpose(1, 2).contiguous()
        return dataclasses.replace(self, **pools, **scales)


PREFILL = ((5, 0), (37, 0), (1, 0))
CHUNK = ((7, 21), (19, 40), (3, 1))
DECODE = ((1, 0), (1, 33), (1, 15), (1, 16), (1, 70))
MIXED = ((1, 30), (23, 9), (0, 12), (1, 0), (40, 0), (0, 0), (1, 64))

CASES = (
    Case(name="prefill", requests=PREFILL),
    Case(name="chunk", requests=CHUNK, block_size=8),
    Case(name="decode", requests=DECODE),
    Case(name="mixed", requests=MIXED, padding_rows=3),
    Case(name="one_row", requests=((1, 4),), padding_rows=1),
    Case(name="only_padding", requests=((0, 0), (0, 9)), padding_rows=2),
    Case(name="no_request", requests=(), padding_rows=2),
    Case(name="no_grouping", requests=MIXED, query_heads=3, kv_heads=3),
    Case(name="group_of_7", requests=MIXED, query_heads=14, kv_heads=2),
    Case(name="one_kv_head", requests=DECODE, query_heads=5, kv_heads=1),
    Case(name="window_of_1", requests=MIXED, window=1),
    Case(name="window_shorter_than_a_block", requests=MIXED, window=5, block_size=8),
    Case(name="window_over_blocks", requests=((1, 130), (70, 90), (2, 0)), window=33, padding_rows=1),
    Case(name="softcap", requests=MIXED, softcap=1.5),
    Case(name="softcap_saturated", requests=DECODE, softcap=0.5, scale=90.0),
    Case(name="window_and_softcap", requests=MIXED, softcap=3.0, window=11, block_size=32),
    Case(name="block_size_32", requests=CHUNK, block_size=32),
    Case(name="block_size_5", requests=CHUNK, block_size=5),
    Case(name="block_size_128", requests=MIXED, block_size=128),
    Case(name="wide_values", requests=MIXED, key_size=24, value_size=40),
    Case(name="narrow_values", requests=CHUNK, key_size=48, value_size=8),
    Case(name="chunk_of_1", requests=MIXED, chunk=1),
    Case(name="chunk_shorter_than_a_block", requests=MIXED, chunk=5, block_size=8),
    Case(name="chunk_of_two_blocks", requests=((1, 64), (1, 63), (70, 90), (0, 32), (33, 0)), chunk=32, padding_rows=1),
    Case(name="chunk_and_window", requests=((1, 130), (70, 90), (2, 0)), chunk=48, window=33),
    Case(name="sinks", requests=MIXED, sinks=0.0, padding_rows=3),
    Case(name="sinks_far_above_the_scores", requests=MIXED, sinks=150.0, query_heads=6),
    Case(name="sinks_far_below_the_scores", requests=MIXED, sinks=-150.0),
    Case(name="sinks_window_and_softcap", requests=MIXED, sinks=0.5, window=9, softcap=2.0),
    Case(name="sinks_of_rows", requests=MIXED, sinks=0.0, row_sinks=True, padding_rows=3, query_heads=6),
    Case(name="sinks_of_rows_far_above", requests=CHUNK, sinks=90.0, row_sinks=True, window=9, block_size=8),
    Case(name="slopes", requests=MIXED, slopes=True, padding_rows=1),
    Case(name="slopes_of_7_heads", requests=CHUNK, slopes=True, query_heads=14, block_size=8),
    Case(name="distances", requests=MIXED, distances=11, padding_rows=2),
    Case(name="distances_of_7_heads", requests=CHUNK, distances=64, query_heads=14, block_size=8),
    Case(name="distances_of_all_rows", requests=MIXED, distances=-37, padding_rows=2),
    Case(name="one_distance", requests=DECODE, distances=1, softcap=2.0, window=30),
    Case(name="everything", requests=MIXED, chunk=24, window=17, softcap=3.0, sinks=0.0, slopes=True, distances=9),
    Case(name="prefix", requests=MIXED, prefix=19, padding_rows=2),
    Case(name="prefix_of_2", requests=CHUNK, prefix=2, block_size=8),
    Case(name="prefix_longer_than_most", requests=((5, 0), (37, 0), (1, 30), (3, 62), (0, 9)), prefix=64, block_size=5),
    Case(name="prefix_and_all_that_goes_with_it", requests=MIXED, prefix=33, softcap=3.0, sinks=0.5, slopes=True),
    Case(name="head_size_64", requests=MIXED, key_size=64, value_size=64, strided=True),
    Case(name="head_size_80", requests=CHUNK, key_size=80, value_size=80),
    Case(name="head_size_128", requests=DECODE, key_size=128, value_size=128, scale=0.09),
    Case(name="strided", requests=MIXED, strided=True, padding_rows=2),
)

# Every combination of the features that change a score or hide a key: absent or there.
FEATURES = {"window": (0, 19), "softcap": (0.0, 2.0), "chunk": (0, 26), "sinks": (None, 0.5), "slopes": (False, True)}
COMBINATIONS = tuple(
    Case(
        name="_".join(name for name, value in zip(FEATURES, values, strict=True) if value) or "no_feature",
        requests=((1, 30), (23, 19), (0, 12), (3, 49)),
        **dict(zip(FEATURES, values, strict=True)),
    )
    for values in itertools.product(*FEATURES.values())
)


# What goes with a prefix, which windows and chunks do not.
WITH_PREFIX = tuple(
    dataclasses.replace(case, name=f"prefix_{case.name}", prefix=27)
    for case in COMBINATIONS
    if not case.window and not case.chunk
)


def cases() -> st.SearchStrategy[Case]:
    """Steps of any requests, sizes and features, small enough for a hundred of them."""
    heads = st.sampled_from(((4, 2), (3, 3), (14, 2), (5, 1), (20, 1)))
    sizes = st.sampled_from((5, 8, 16, 24, 64))
    small = st.just(0) | st.integers(1, 70)
    limits = st.builds(dict, window=small, chunk=small, distances=st.just(0) | st.integers(-200, 200))
    return st.builds(
        lambda heads, limits, **fields: Case(name="drawn", query_heads=heads[0], kv_heads=heads[1], **limits, **fields),
        heads=heads,
        limits=limits | st.builds(dict, prefix=st.integers(1, 200)),
        requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), max_size=4).map(tuple),
        key_size=sizes,
        value_size=sizes,
        block_size=st.sampled_from((5, 8, 16, 32)),
        softcap=st.just(0.0) | st.floats(0.5, 20.0),
        sinks=st.none() | st.floats(-150.0, 150.0),
        row_sinks=st.booleans(),
        slopes=st.booleans(),
        padding_rows=st.integers(0, 2),
        strided=st.booleans(),
    )


def make_inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Draw a step on the CPU. All that may not be read is NaN: unused slots, padding rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([rows for rows, _ in case.requests], dtype=torch.int64)
    contexts = torch.tensor([rows + past for rows, past in case.requests], dtype=torch.int64)
    used, num_rows = int(lengths.sum()), int(lengths.sum()) + case.padding_rows
    sizes = (
        (case.query_heads, case.key_size),
        (case.kv_heads, case.key_size),
        (case.kv_heads, case.value_size),
    )
    rows = [_draw(num_rows, heads, size, generator, strided=case.strided).to(dtype) for heads, size in sizes]
    for tensor in rows:
        tensor[used:] = torch.nan
    table, num_blocks = _draw_block_table(contexts, case.block_size, generator)
    pools = [torch.full((num_blocks, case.kv_heads, case.block_size, size), torch.nan) for _, size in sizes[1:]]
    slots = torch.full((num_rows,), -1)
    begin = 0
    for n, (count, past) in enumerate(case.requests):
        positions = torch.arange(past + count)
        blocks, offsets = table[n, positions // case.block_size].long(), positions % case.block_size
        # In front of what the first row that is computed sees, blocks are gone: those keys stay NaN.
        visible = slice(first_seen(past, case.window, case.chunk), past)
        for pool in pools:
            drawn = torch.randn(past + count, case.kv_heads, pool.shape[-1], generator=generator)
            pool[blocks[visible], :, offsets[visible]] = drawn[visible]
        slots[begin : begin + count] = (blocks * case.block_size + offsets)[past:]
        begin += count
    return Inputs(
        query=rows[0],
        key=rows[1],
        value=rows[2],
        key_pool=pools[0].to(dtype),
        value_pool=pools[1].to(dtype),
        cu_seqlens_q=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32),
        context_lens=contexts.to(torch.int32),
        block_table=table,
        slot_mapping=slots,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        chunk=case.chunk,
        prefix=case.prefix,
        sinks=None if case.sinks is None else draw_sinks(case, num_rows, used, generator),
        # As of models with ALiBi: from 1, next to nothing but the row itself, to 1 / 256.
        slopes=2 ** (-8 * torch.rand(case.query_heads, generator=generator)) if case.slopes else None,
        distance_bias=draw_distance_bias(case, num_rows, used, generator).to(dtype) if case.distances else None,
    )


def draw_sinks(case: Case, num_rows: int, used: int, generator: torch.Generator) -> Tensor:
    drawn = case.sinks + torch.randn(*([num_rows] if case.row_sinks else []), case.query_heads, generator=generator)
    if case.row_sinks:
        drawn[used:] = torch.nan
    return drawn


def draw_distance_bias(case: Case, num_rows: int, used: int, generator: torch.Generator) -> Tensor:
    rows = num_rows if case.distances > 0 else 1
    drawn = 2 * torch.randn(rows, case.query_heads, abs(case.distances), generator=generator)
    if rows > 1:
        drawn[used:] = torch.nan
    return drawn


def exact_ragged(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's result and pools in float64, from the same (rounded) inputs."""
    wide = inputs.to(torch.float64)
    return reference.ragged_attention(*wide.ragged()), wide.key_pool, wide.value_pool


def exact_varlen(inputs: Inputs) -> Tensor:
    return reference.varlen_attention(*inputs.to(torch.float64).varlen())


def first_seen(position: int, window: int, chunk: int) -> int:
    """The first position that a row at `position` sees, found by asking of each position whether it is seen."""
    near = [j for j in range(position + 1) if not window or position - j < window]
    return next(j for j in near if not chunk or j // chunk == position // chunk)


def _draw(rows: int, heads: int, size: int, generator: torch.Generator, *, strided: bool) -> Tensor:
    """[rows, heads, size]; strided: a view with gaps between rows and heads, as of a fused projection."""
    if not strided:
        return torch.randn(rows, heads, size, generator=generator)
    return torch.randn(heads, rows + 1, size + 8, generator=generator)[:, 1:, 8:].transpose(0, 1)


def _draw_block_table(contexts: Tensor, block_size: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """[N, max_blocks] int32, blocks in random order, and the size of the pool: one more than are used."""
    needed = [-(-int(context) // block_size) for context in contexts]
    num_blocks = sum(needed) + 1
    # Block 0, which unused entries name, is nobody's: it holds NaN.
    order = 1 + torch.randperm(num_blocks - 1, generator=generator)
    table = torch.zeros(len(needed), max([*needed, 1]), dtype=torch.int32)
    for n, blocks in enumerate(order.split(needed)):
        table[n, : len(blocks)] = blocks
    return table, num_blocks
