"""An attention's masks evaluated on short requests and at chosen far positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, BiasLookup, KeyMarks, KeySelection, MaskTerm
from selective_compile.passes.axes import Axis, Dim
from selective_compile.passes.evaluate import evaluate
from selective_compile.passes.mask_reads import BeyondTable, MaskReads, Unproved
from selective_compile.passes.mask_terms import MaskTerms
from selective_compile.passes.positional import at_positions, is_positional_root
from selective_compile.passes.probe import Probe
from selective_compile.passes.rules_lookup import reads_own_index
from selective_compile.passes.score_chain import REPLACED
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
Masked = AttentionCall | KeySelection
Values = Callable[[MaskTerm, torch.Tensor], torch.Tensor]  # of a mask, with these pairs [G, L, L] selected
DENSE_LENGTHS = (2, 3, 5, 17, 40)
STRIP, STRIPS_END = 256, 4096
TILE, ALL_PAIRS = 1024, 2**31  # of a table, so many rows and columns at once, and so many numbers in all
TRIANGLE = 2048  # so many tokens see one another, whatever the mask is made of
FARTHEST = 2**17
NO_REQUEST = 2**24  # has so many tokens: as floats, positions are numbers of their own up to here
ANCHORS, SCATTERED = 4, 2**14  # positions that are looked at with every other; groups of positions drawn at random
GOLDEN = (5**0.5 - 1) / 2  # whose multiples are spread evenly
SHORTER = (12, 130, 257, 1000)
FAR_POSITIONS = tuple(range(12)) + tuple(2**k + d for k in range(4, 17) for d in (-1, 0, 1))


def dense_probes(traced: TracedGraph, call: Masked, reads: MaskReads) -> Iterator[Probe]:
    generator = torch.Generator().manual_seed(0)
    batch, padding = 3 if traced.sizes.batch is not None else 1, reads.padding
    for length in DENSE_LENGTHS:
        if reads.limit is not None and length > reads.limit:
            return
        for round_ in range(1 if padding is None else 3):
            real = torch.ones(batch, length, dtype=torch.int64, device="cpu")
            if round_:
                real = torch.randint(0, 2, (batch, length), generator=generator, device="cpu")
                real[:, length // 2] = 1
            value_of = partial(dense, traced, reads, real)
            yield both(traced, call, reads, torch.arange(length, device="cpu").expand(batch, -1), real != 0, value_of)


def dense(
    traced: TracedGraph, reads: MaskReads, real: torch.Tensor, term: MaskTerm, chosen: torch.Tensor
) -> torch.Tensor:
    """The mask of short requests, ``real [B, L]`` telling padding, by its own graph."""
    given = {} if reads.padding is None else {reads.padding: real.to(reads.padding.meta["val"].dtype)}
    given |= stand_ins(traced, reads, chosen)
    value = evaluate(traced, term.node, batch=len(real), tokens=real.shape[1], given=given)
    return heads_apart(traced, term, value, real.shape[1])


def steps_of(traced: TracedGraph, call: Masked, reads: MaskReads) -> frozenset[fx.Node]:
    """Of what is added to scores, masks that are 0 or at most `REPLACED` wherever they are looked at.

    What such a mask adds, as -10,000 or float16's lowest number in float32, hides as that would in a score's place: it
    is no bias of far positions, which has smaller numbers for near ones.
    """
    generator = torch.Generator().manual_seed(3)
    length = DENSE_LENGTHS[-1] if reads.limit is None else min(DENSE_LENGTHS[-1], reads.limit)
    some = torch.randint(0, 2, (1, length), generator=generator, device="cpu")
    every = torch.ones(1, length, length, dtype=torch.bool, device="cpu")

    def is_step(term: MaskTerm) -> bool:
        with within_tables(term):
            values = [dense(traced, reads, real, term, every) * term.factor for real in (torch.ones_like(some), some)]
        return all(bool(((value == 0) | (value <= REPLACED)).all()) for value in values)

    return frozenset(term.node for term in call.masks if term.kind == "add" and is_step(term))


def strip_probes(traced: TracedGraph, call: Masked, reads: MaskReads, heads: int) -> Iterator[Probe]:
    """Every position up to `STRIPS_END`, with its neighbours, fewer of them for many heads, and the first positions."""
    generator, width = torch.Generator().manual_seed(1), max(64, int(STRIP / heads**0.5))
    for start in range(0, STRIPS_END, width):
        first, strip = (torch.arange(*ends, device="cpu") for ends in ((0, min(start, 4)), (start, start + width)))
        positions = within(reads, torch.cat([first, strip]))
        if len(positions) > 1:
            real = torch.rand(len(positions), generator=generator, dtype=torch.float32, device="cpu") < 0.9
            yield far_probe(traced, call, reads, positions, real)


def triangle_probes(traced: TracedGraph, call: Masked, reads: MaskReads, heads: int) -> Iterator[Probe]:
    """Every pair of the first positions: fewer of them where each head has numbers of its own."""
    yield from tiles(traced, call, reads, triangle_of(reads, heads), heads)


def triangle_of(reads: MaskReads, heads: int) -> int:
    most = int(TRIANGLE / heads**0.5)
    return most if reads.limit is None else min(most, reads.limit)


def scattered_probes(traced: TracedGraph, call: Masked, reads: MaskReads, heads: int) -> Iterator[Probe]:
    """Every position, as query and as key, with the same few others; and pairs at every distance, anywhere.

    What a mask does at some distance, or at some key, it need not do because of a number in its graph.
    """
    end = FARTHEST if reads.limit is None else min(FARTHEST, reads.limit)
    if end <= triangle_of(reads, heads):  # all pairs have been looked at
        return
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(end, (ANCHORS - 2,), generator=generator, device="cpu")
    anchors = torch.tensor([0, min(TRIANGLE // 3, end - 1), *drawn.tolist()], device="cpu")
    others = torch.randperm(end, generator=generator, device="cpu")
    others = others[: max(1, end // heads // ANCHORS) * ANCHORS].view(-1, ANCHORS)
    yield far_probe(traced, call, reads, torch.cat([anchors.expand(len(others), -1), others], 1).sort().values)
    first = torch.randint(end, (SCATTERED // heads, 1), generator=generator, device="cpu")
    share = torch.rand(len(first), 2 * ANCHORS - 1, generator=generator, dtype=torch.float32, device="cpu")
    apart = (end**share).long()
    behind = first + apart if reads.limit is None else (first + apart).clamp(max=end - 1)
    yield far_probe(traced, call, reads, torch.cat([first, behind], 1).sort().values)


def tile_probes(traced: TracedGraph, call: Masked, reads: MaskReads, heads: int) -> Iterator[Probe]:
    """Every pair of positions that tables have rows for, and some requests that are shorter than the longest.

    Raises `Unproved` where the tables are too large for that.
    """
    limit = reads.limit
    assert limit is not None
    if limit * limit * heads > ALL_PAIRS:
        pairs = f"{limit} x {limit} positions of {heads} heads"
        raise Unproved(call.masks[0].node, f"its mask reads a table that is too large to be looked at whole: {pairs}")
    yield from tiles(traced, call, reads, limit, heads)
    if any(rows.from_end for rows in reads.rows.values()):
        tile = tile_of(heads)
        for length in {limit - 1, limit // 2, limit // 3, *(c for c in SHORTER if c < limit)} - {0, 1}:
            last = torch.arange(min(length, tile), device="cpu") + max(0, length - tile)
            yield far_probe(traced, call, reads, within(reads, last))


def tiles(traced: TracedGraph, call: Masked, reads: MaskReads, end: int, heads: int) -> Iterator[Probe]:
    """Every pair of positions in front of ``end``."""
    tile = tile_of(heads)
    starts = range(0, end, tile)
    for j in starts:
        for i in starts if len(starts) == 1 else range(0, j, tile):
            parts = [torch.arange(start, min(start + tile, end), device="cpu") for start in sorted({i, j})]
            yield far_probe(traced, call, reads, torch.cat(parts))


def tile_of(heads: int) -> int:
    return max(64, int(TILE / heads**0.5))


def far_probe(
    traced: TracedGraph,
    call: Masked,
    reads: MaskReads,
    positions: torch.Tensor,
    real: torch.Tensor | None = None,
) -> Probe:
    """The mask at chosen positions, ``[L]`` of one request or ``[G, L]``, of requests that end with the last of them.

    Reads at a token's own index are then reads at its place here, and tables are read at the positions.
    """
    positions = positions.reshape(-1, positions.shape[-1])
    length, padding = positions.shape[1], reads.padding
    if padding is None or real is None:
        real = torch.ones(length, dtype=torch.bool, device="cpu")
    roots = {n for term in call.masks for n in reads.behind(term.node) if n in traced.axes}
    known = {n: at_positions(traced, n, positions) for n in roots if is_positional_root(traced.axes[n], n)}
    hides = {} if padding is None else {padding: real[None].to(padding.meta["val"].dtype)}

    def value_of(term: MaskTerm, chosen: torch.Tensor) -> torch.Tensor:
        def of_one(positions: torch.Tensor, known: Mapping[fx.Node, Any], chosen: torch.Tensor) -> torch.Tensor:
            def at_places(node: fx.Node, args: tuple[Any, ...]) -> torch.Tensor | None:
                if node in reads.rows:
                    return reads.rows[node].at(args[0], positions, positions[-1] + 1)
                if not reads_own_index(node, traced.axes):
                    return None
                if node.target is aten.index_select.default:
                    place: Any = node.args[2]
                    return aten.index_select.default(args[0], args[1], places_of(traced.axes[place], args[2]))
                nodes: Any = node.args[1]
                index = [i if i is None else places_of(traced.axes[n], i) for n, i in zip(nodes, args[1], strict=True)]
                return aten.index.Tensor(args[0], index)

            given: dict[fx.Node, Any] = {**known, **hides, **stand_ins(traced, reads, chosen[None])}
            value = evaluate(traced, term.node, batch=1, tokens=length, given=given, instead=at_places)
            return heads_apart(traced, term, value, length)[0]

        return torch.vmap(of_one)(positions, known, chosen)

    return both(traced, call, reads, positions, real.expand(len(positions), -1), value_of)


@contextmanager
def within_tables(term: MaskTerm) -> Iterator[None]:
    """Raises `BeyondTable` where what is computed inside reads a table beyond its end."""
    try:
        yield
    except (IndexError, RuntimeError) as error:  # which of them, is for the operator to say
        if isinstance(error, RuntimeError) and "out of bounds" not in str(error):
            raise
        raise BeyondTable(term.node, "its mask reads a table beyond its end") from error


def within(reads: MaskReads, positions: torch.Tensor) -> torch.Tensor:
    """Those that the tables have rows for."""
    return positions if reads.limit is None else positions[positions < reads.limit]


def places_of(axes: Any, index: torch.Tensor) -> torch.Tensor:
    """An index that numbers tokens or requests, counted from 0 instead of by position."""
    return torch.arange(index.numel(), device="cpu").reshape(index.shape) if axes.numbers else index


def far_positions(constants: Iterable[int]) -> torch.Tensor:
    near = [c * k + d for c in constants for k in (1, 2) for d in (-2, -1, 0, 1, 2)]
    chosen = sorted({p for p in (*FAR_POSITIONS, *near) if 0 <= p < NO_REQUEST})
    return torch.tensor(chosen, dtype=torch.int64, device="cpu")


def both(
    traced: TracedGraph,
    call: Masked,
    reads: MaskReads,
    positions: torch.Tensor,
    real: torch.Tensor,
    value_of: Values,
) -> Probe:
    """The masks at ``positions`` ``[G, L]`` with every key selected; those ``real`` ``[G, L]`` are no padding.

    Selecting some of the keys must hide the others from real queries, and do nothing else.
    """
    every = torch.ones((), dtype=torch.bool, device="cpu").expand(*positions.shape, positions.shape[1])
    allowed, bias = combined(call, positions, value_of, every, reads.steps)
    if reads.marks:
        generator = torch.Generator().manual_seed(positions.shape[1])
        some = torch.rand(every.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.5
        left, same = combined(call, positions, value_of, some, reads.steps)
        expected = (allowed & some)[real], bias.masked_fill(~(allowed & some)[:, None], 0).movedim(1, -1)[real]
        if not (torch.equal(left[real], expected[0]) and torch.equal(same.movedim(1, -1)[real], expected[1])):
            raise Unproved(reads.marks[0].node, "it does more or less than hide the keys that were not selected")
    looked_up = table = None
    for lookup in reads.lookups:
        looked_up = rows_looked_up(lookup, positions, value_of, every)
        table = table_for(traced, reads, lookup, positions.shape[1])
    return Probe(
        positions=positions,
        allowed=allowed,
        bias=bias,
        hidden_keys=~real,
        real_queries=real,
        looked_up=looked_up,
        table=table,
    )


def rows_looked_up(lookup: BiasLookup, positions: torch.Tensor, value_of: Values, every: torch.Tensor) -> torch.Tensor:
    """[G, L, L]: of each pair at ``positions`` [G, L]."""
    index = value_of(MaskTerm(node=lookup.index, kind="keep", pair=lookup.pair), every).long()
    if lookup.counts_from_end:
        index = torch.where(index < 0, index + lookup.rows, index)
    if not bool((index == index[:, :1]).all()):
        raise Unproved(lookup.node, "it looks biases up at other places for other heads")
    return index[:, 0].expand(*positions.shape, positions.shape[1])


def table_for(traced: TracedGraph, reads: MaskReads, lookup: BiasLookup, length: int) -> torch.Tensor:
    """[L or 1, heads, rows]: what proofs have in place of what is looked up in."""
    numbers = numbers_for(traced, reads, lookup, 1, length).permute(lookup.order)
    return numbers.reshape(length if lookup.per_query else 1, -1, lookup.rows)


def stand_ins(traced: TracedGraph, reads: MaskReads, chosen: torch.Tensor) -> dict[fx.Node, torch.Tensor]:
    """The marks' tensors where those pairs ``[batch, length, length]`` are selected, and what biases are looked up in:
    the same numbers for each request, and others for each of its tokens."""
    batch, length, _ = chosen.shape
    sizes: dict[Dim, int] = {(): 1, (Axis.BATCH,): batch, (Axis.TOKEN,): length}

    def tensor(marks: KeyMarks) -> torch.Tensor:
        like = marks.node.meta["val"]
        shape = [sizes[dim] for dim in traced.axes[marks.node].dims]
        values = torch.full(shape, marks.unmarked, dtype=like.dtype, device="cpu")
        return values.masked_fill(chosen.reshape(shape), marks.marked)

    return {
        **{marks.node: tensor(marks) for marks in reads.marks},
        **{lookup.source: numbers_for(traced, reads, lookup, batch, length) for lookup in reads.lookups},
    }


def numbers_for(traced: TracedGraph, reads: MaskReads, lookup: BiasLookup, batch: int, length: int) -> torch.Tensor:
    """Numbers in place of what biases are looked up in, which no two entries share and of which none is 0."""
    dims = traced.axes[lookup.source].dims
    if length not in reads.numbers:
        sizes: dict[Dim, int] = {(Axis.BATCH,): 1, (Axis.TOKEN,): length}
        shape = [sizes.get(dim, prod(f for f in dim if isinstance(f, int))) for dim in dims]
        # As random ones, which are not drawn in a function of many requests at once.
        numbers = 0.5 + torch.arange(prod(shape), dtype=torch.float64, device="cpu") * GOLDEN % 1
        reads.numbers.clear()  # probes of one length follow one another
        reads.numbers[length] = numbers.to(lookup.source.meta["val"].dtype).reshape(shape)
    return reads.numbers[length].expand([batch if dim == (Axis.BATCH,) else -1 for dim in dims])


def combined(
    call: Masked,
    positions: torch.Tensor,
    value_of: Values,
    chosen: torch.Tensor,
    steps: Collection[fx.Node] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs that the causal flag and every mask of the call allow, ``[G, L, L]`` for all heads, and what the masks
    add to their scores, ``[G, heads or 1 or 0, L, L]``; ``steps`` as of `MaskReads`."""
    groups, length = positions.shape
    allowed = torch.ones(groups, length, length, dtype=torch.bool, device="cpu")
    if call.causal_flag:
        allowed &= positions[:, :, None] >= positions[:, None, :]

    def value(term: MaskTerm) -> torch.Tensor:
        with within_tables(term):
            return value_of(term, chosen)

    factors = [term for term in call.masks if term.kind == "times"]
    masks = [term for term in call.masks if term.kind != "times"]
    found = MaskTerms(allowed, several=len(call.masks) > 1, steps=steps)
    for term in masks:
        found.take(term, value(term))
    if masks:
        found.check_hidden(masks[0].node)
    for term in factors:
        found.take_factor(term, value(term))
    return found.allowed, found.bias


def heads_apart(traced: TracedGraph, term: MaskTerm, value: torch.Tensor, length: int) -> torch.Tensor:
    """``[batch or 1, heads or 1, length or 1, length or 1]`` of a mask ``[..., length, length]``, also of one whose
    requests and heads are merged, with queries too, or whose heads are behind."""
    value, dims = pair_last(term, value, traced.axes[term.node].dims)
    rows = dims[-2]
    factors = [f for dim in dims[:-2] for f in dim]
    if len(rows) > 1:
        if rows[-1] is not Axis.TOKEN:
            raise Unproved(term.node, "its mask must have the queries of one head and request side by side")
        factors += rows[:-1]
        value = value.unflatten(-2, (-1, length))
    pair = ((1, 1) + tuple(value.shape))[-2:]
    if Axis.BATCH not in factors:
        return value.reshape(1, -1, *pair)
    if any(not isinstance(f, int) and f is not Axis.BATCH for f in factors):
        raise Unproved(term.node, "its mask must be one of heads, queries and keys")
    plain = prod(f for f in factors if isinstance(f, int))
    batch = value.numel() // (plain * pair[0] * pair[1])
    sizes = [f if isinstance(f, int) else batch for f in factors]
    value = value.reshape(*sizes, *pair)
    return value.movedim(factors.index(Axis.BATCH), 0).reshape(batch, -1, *pair)


def pair_last(term: MaskTerm, value: torch.Tensor, dims: tuple[Dim, ...]) -> tuple[torch.Tensor, list[Dim]]:
    """With queries and keys as the last two dimensions, in front of which are two or more."""
    front = max(0, -min(term.pair) - len(dims))
    dims, value = ((),) * front + dims, value.reshape(*(1,) * front, *value.shape)
    places = [dim % len(dims) for dim in term.pair]
    others = [dim for dim in range(len(dims)) if dim not in places]
    return value.permute(*others, *places), [(), (), *(dims[dim] for dim in (*others, *places))]
