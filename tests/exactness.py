"""Whether a rewritten model is exact: its logits against the model's own, in the engine's step and a padded call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.options import Fallback
from selective_compile.report import Report
from selective_compile.runtime.kv_cache import reaches_of
from selective_compile.step import LONG, StepInputs
from selective_compile.step_program import StepProgram

TOLERANCE = 1e-4
BLOCK = 4
EAGER = {"inductor": False}


def step_program(model: nn.Module, fallback: Fallback = "refuse") -> StepProgram:
    """Proved ragged as a whole, unless something else is asked for."""
    program = compile_step_program(model, sc.EngineConfig(compile=False, fallback=fallback))
    assert isinstance(program, StepProgram)
    return program


def logits_in_chunks(program: StepProgram, prompts: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
    """``[length, V]`` of each prompt, all advancing together by up to ``chunk`` tokens a step, in scattered blocks."""
    width = -(-max(map(len, prompts)) // BLOCK)
    blocks = torch.randperm(width * len(prompts), generator=torch.Generator().manual_seed(0)).view(len(prompts), width)
    pools = [
        tuple(
            torch.full((blocks.numel(), site.num_kv_heads, BLOCK, size), torch.nan, dtype=site.pool_dtype)
            for size in site.pool_rows
        )
        for site in program.call_sites
    ]
    states = [torch.full((len(prompts) + 1, *site.shape), torch.nan, dtype=site.dtype) for site in program.state_sites]
    found: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        rows = [range(min(start, len(p)), min(start + chunk, len(p))) for p in prompts]
        inputs = step_inputs(prompts, rows, blocks)
        if program.long_form is not None:
            longer = [len(p) > program.long_form.beyond for p, r in zip(prompts, rows, strict=True) for _ in r]
            inputs.positions[: len(longer)] += LONG * torch.tensor(longer)
        # Every block is kept here, so that calls that see less far can do with the same table.
        others = len(reaches_of(program.call_sites)) - 1
        inputs = replace(inputs, other_tables=((inputs.block_table, inputs.slot_mapping),) * others)
        logits = program(inputs, pools, states)
        parts = logits.split([max(len(r), 0) for r in rows] + [logits.shape[0] - sum(map(len, rows))])
        for collected, part in zip(found, parts, strict=False):
            collected.append(part)
    return [torch.cat(parts) for parts in found]


def step_inputs(prompts: Sequence[Sequence[int]], rows: Sequence[range], blocks: Tensor) -> StepInputs:
    ids = [prompts[n][p] for n, r in enumerate(rows) for p in r]
    places = [p for r in rows for p in r]
    slots = [int(blocks[n, p // BLOCK]) * BLOCK + p % BLOCK for n, r in enumerate(rows) for p in r]
    missing = max(0, 2 - len(ids))
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return StepInputs(
        state_slots=torch.arange(len(prompts), 0, -1),
        input_ids=torch.tensor(ids + [0] * missing),
        positions=torch.tensor(places + [0] * missing),
        cu_seqlens_q=bounds.to(torch.int32),
        context_lens=torch.tensor([r.stop for r in rows], dtype=torch.int32),
        block_table=blocks.to(torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * missing),
        logit_rows=torch.arange(len(ids) + missing),
        requests=tuple(range(len(rows))),
    )


def engine_error(
    model: nn.Module,
    *,
    vocabulary: int,
    lengths: Sequence[int] = (1, 2, 23, 40, 7),
    chunk: int = 5,
    fallback: Fallback = "refuse",
    program: StepProgram | None = None,
) -> float:
    """The largest difference of a logit from the model's own on each request alone; ``program``: the model's, where it
    is there already.  Raises `sc.RefusedError`."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    program = program or step_program(model, fallback)
    with torch.no_grad():
        alone = [logits_of(model(torch.tensor([prompt])))[0] for prompt in prompts]
    worst = 0.0
    for size in (chunk, max(lengths)):
        ours = logits_in_chunks(program, prompts, size)
        worst = max([worst, *(greatest(a - b) for a, b in zip(ours, alone, strict=True))])
    return worst


def padded_batch(vocabulary: int, *, batch: int = 4, length: int = 19, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Ids and a mask padded left, right, on both sides, and not at all."""
    ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, 11:] = 0, 0
    mask[2, :3], mask[2, 16:] = 0, 0
    return ids, mask


def fast(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    sc.selective.reports.clear()
    return torch.compile(model, backend=sc.selective, options={**EAGER, **options})


def padded_error(model: nn.Module, *, vocabulary: int, masked: bool = True) -> tuple[float, Report]:
    """The largest difference of a real token's logit, over two batches of other sizes, and the report on the graph."""
    compiled, worst = fast(model), 0.0
    for shape in ({}, {"batch": 5, "length": 27}):
        ids, mask = padded_batch(vocabulary, **shape)
        arguments = (ids, mask) if masked else (ids,)
        with torch.no_grad():
            ours, theirs = logits_of(compiled(*arguments)), logits_of(model(*arguments))
        assert ours.shape == theirs.shape
        real = mask.bool() if masked else torch.ones_like(mask, dtype=torch.bool)
        worst = max(worst, greatest((ours - theirs)[real]))
    return worst, sc.selective.reports[-1]


def greatest(difference: Tensor) -> float:
    return float("inf") if bool(difference.isnan().any()) else float(difference.abs().max())


def logits_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result.logits
