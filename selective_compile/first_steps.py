"""The first steps of a program, of nobody's tokens: what they settle, as whether its native calls can be made by
themselves, is settled before a request comes, in pools of a few blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, fx

from selective_compile import ops
from selective_compile.grouped_ops import group_rows, grouped_linear, take_rows
from selective_compile.int8_ops import linears_int8
from selective_compile.latent_ops import head_products, latent_attention
from selective_compile.step import StepInputs

BLOCK = 8
# Tokens of each request, rows of logits, and entries of a block table: no two sizes of a step are alike, so that one
# taken for another would show.
STEPS = (((2, 2, 1), 2, 4), ((3, 1, 4, 2), 3, 5), ((2, 2, 1), 2, 4))
FOLLOWED = {
    *(ops.linear, ops.linears, ops.ragged_attention, linears_int8, head_products, latent_attention),
    *(grouped_linear, group_rows, take_rows),
}


def may_be_followed(graph: fx.Graph) -> bool:
    """Whether the operators of ours in it are among those whose native calls are known."""
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return all(target in FOLLOWED for target in targets if target.namespace == "selective")


def run_first_steps(
    run: Callable[[StepInputs, Sequence[tuple[Tensor, Tensor]]], Tensor],
    shapes: Sequence[tuple[int, tuple[int, int], torch.dtype]],
    *,
    num_tables: int,
) -> None:
    """
    Args:
        run: of inputs and pools, on a CPU.
        shapes: of each pair of pools the heads, the lengths of their rows, and the dtype.
        num_tables: block tables of a request.
    """
    blocks = max(len(counts) for counts, _, _ in STEPS)
    pools = [
        tuple(torch.zeros((blocks, heads, BLOCK, size), dtype=dtype, device="cpu") for size in sizes)
        for heads, sizes, dtype in shapes
    ]
    for counts, rows, width in STEPS:
        run(_inputs(counts, rows, width, num_tables), pools)  # type: ignore[arg-type]


def _inputs(counts: Sequence[int], rows: int, width: int, num_tables: int) -> StepInputs:
    """Each request's prompt in a block of its own."""
    places = [place for count in counts for place in range(count)]
    slots = [number * BLOCK + place for number, count in enumerate(counts) for place in range(count)]
    table = _integers([[number] + [0] * (width - 1) for number in range(len(counts))], torch.int32)
    mapping = _integers(slots, torch.int64)
    return StepInputs(
        input_ids=_integers([0] * len(places), torch.int64),
        positions=_integers(places, torch.int64),
        cu_seqlens_q=_integers([0, *accumulate(counts)], torch.int32),
        context_lens=_integers(list(counts), torch.int32),
        block_table=table,
        slot_mapping=mapping,
        other_tables=((table, mapping),) * (num_tables - 1),
        logit_rows=_integers(list(accumulate(counts))[:rows], torch.int64) - 1,
        requests=tuple(range(len(counts))),
    )


def _integers(values: Sequence[object], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")
