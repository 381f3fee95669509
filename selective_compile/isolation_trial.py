"""A trial of a flat graph with isolated modules, before it is used: against the model itself, on two short requests.

That a module's results for a token do not depend on the tokens behind it, and that it is called as the model calls it,
is not proved from a graph.  A model for which it is not so is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from selective_compile.isolated_program import TRIED
from selective_compile.model_call import CANNOT, logits_call
from selective_compile.module_state import unchanged
from selective_compile.rounding import computed_in, rounded_as, tolerance
from selective_compile.step import GENERATED, StepInputs, reaches
from selective_compile.step_program import StepProgram

Departure = Literal["none", "some", "all"]
BLOCK = 128
# How many tokens of each of the two requests are in each step.
STEPS = ((6, 0), (1, 3), (12, 1), (2, 17), (44, 20), (1, 24))
LENGTHS = tuple(map(sum, zip(*STEPS, strict=True)))
# Where each request has tokens that begin a part of it, behind the first.
BEGINS = [[sum(each[:n]) for n in range(1, len(each)) if any(each[:n])] for each in zip(*STEPS, strict=True)]
NEEDED = max(LENGTHS)  # tokens that a model must know
# A module that looks ahead need not do so in a short request: a longer one, of the first of these lengths that the
# model knows, must have the logits of its leading tokens run alone.  Behind the end of a table a CPU raises an error,
# and a GPU is of no use any more: none behind an end that is known is tried.
LONGER = (300, 128, 64)


@torch.no_grad()
def departure(model: nn.Module, program: StepProgram) -> Departure:
    """Which of the program's logits are others than the model's; "all" also where it cannot be run.

    "some": no more than rounding makes of it that decides whom a router chooses, which is in rows anywhere. A module
    that goes on wrongly where a part of a request begins is wrong in the first row of each, however few these are.
    """
    generator = torch.Generator().manual_seed(0)
    assert min(LENGTHS) >= TRIED
    if program.max_positions is not None and program.max_positions < NEEDED:
        return "all"  # nobody can try it
    ids = min(program.num_ids, 1000)
    prompts = [torch.randint(0, ids, (n,), generator=generator, device="cpu") for n in LENGTHS]
    prompts = [prompt.to(program.device) for prompt in prompts]
    try:
        longer = torch.randint(0, ids, (LONGER[0],), generator=generator, device="cpu")
        if looks_ahead(model, longer.to(program.device), program.max_positions):
            return "all"
        ours = in_steps(program, prompts)
        alone = [logits_alone(model, prompt) for prompt in prompts]
    except CANNOT:
        return "all"
    pairs = list(zip(ours, alone, strict=True))
    if all(alike(model, *pair) for pair in pairs):
        return "none"
    begins = [torch.cat([rows[place] for rows, place in zip(each, BEGINS, strict=True)]) for each in (ours, alone)]
    in_most = all(alike(model, *pair, in_most=True) for pair in (*pairs, begins))
    return "some" if in_most else "all"


def looks_ahead(model: nn.Module, prompt: Tensor, longest: int | None) -> bool:
    """Whether the model's logits of some leading tokens are others if the prompt goes on behind them."""
    for length in (length for length in LONGER if longest is None or length <= longest):
        try:
            whole = logits_alone(model, prompt[:length])
        except CANNOT:  # a table of positions of which nobody knew ends before
            continue
        prefixes = (length // 5, length // 2, length - 1)
        return not all(alike(model, whole[:count], logits_alone(model, prompt[:count])) for count in prefixes)
    return True


def alike(model: nn.Module, rows: Tensor, theirs: Tensor, *, in_most: bool = False) -> bool:
    """Whether logits [length, V] are the same but for rounding.

    ``in_most``: in three of four rows do where the model does not compute in float32 and rows were computed beside
    others, so that rounding may decide whom a router chooses; what is computed otherwise shows in nearly all.
    """
    dtype, device = computed_in(model, theirs), theirs.device
    worst = (rows.float() - theirs.float()).abs().amax(-1) / theirs.float().std()
    coarse = rounded_as(dtype, device) not in (torch.float32, torch.float64)
    return bool((worst.quantile(0.75) if in_most and coarse else worst.max()) <= tolerance(dtype, device))


def logits_alone(model: nn.Module, prompt: Tensor) -> Tensor:
    """``[length, V]`` by the model itself."""
    call, arguments = logits_call(model, prompt[None])
    with unchanged(model):
        return call(*arguments)[0]


def in_steps(
    program: StepProgram,
    prompts: list[Tensor],
    steps: Sequence[tuple[int, ...]] = STEPS,
    block: int = BLOCK,
    *,
    generates: bool = False,
) -> list[Tensor]:
    """Logits ``[length, V]`` of each prompt, all of them advancing together by ``steps``; each has a ``block``.

    ``generates``: what is behind the first step was generated."""
    pools = [
        tuple(
            torch.zeros(len(prompts), site.num_kv_heads, block, size, dtype=site.pool_dtype, device=site.device)
            for size in site.pool_rows
        )
        for site in program.call_sites
    ]
    states = [
        torch.zeros(len(prompts), *site.shape, dtype=site.dtype, device=site.device) for site in program.state_sites
    ]
    # Every block is kept here, so that calls that see less far can do with the same table.
    tables = len(reaches(site.reach for site in program.call_sites)) or 1
    done = [0] * len(prompts)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for counts in steps:
        inputs = step_inputs(prompts, done, counts, block)
        inputs = replace(inputs, other_tables=((inputs.block_table, inputs.slot_mapping),) * (tables - 1))
        if generates and any(done) and program.marks_positions:
            inputs = replace(inputs, positions=inputs.positions + GENERATED)
        logits = program(inputs, pools, states)  # type: ignore[arg-type]
        for error in program.take_failed().values():
            raise error
        for rows, part in zip(found, logits.split([*counts, len(logits) - sum(counts)]), strict=False):
            rows.append(part)
        done = [before + count for before, count in zip(done, counts, strict=True)]
    return [torch.cat(rows) for rows in found]


def rows_by_program(program: StepProgram, tokens: Tensor) -> Tensor:
    """Logits ``[length, V]`` of all tokens of one prompt; it runs twice, as of `by_program`."""
    return in_steps(program, [tokens, tokens], [(len(tokens), len(tokens))], max(BLOCK, len(tokens)))[0]


def by_program(program: StepProgram, tokens: Tensor, counts: Sequence[int]) -> Tensor:
    """Logits ``[len(counts), V]`` of the last token of each step of so many, of which the first is a prompt's; of two
    requests alike, since a step has two tokens at least."""
    steps = [(count, count) for count in counts]
    ours = in_steps(program, [tokens, tokens], steps, max(BLOCK, len(tokens)), generates=True)[0]
    return ours[[end - 1 for end in accumulate(counts)]]


def step_inputs(prompts: list[Tensor], done: list[int], counts: tuple[int, ...], block: int) -> StepInputs:
    device = prompts[0].device
    places = [torch.arange(start, start + count, device="cpu") for start, count in zip(done, counts, strict=True)]
    slots = [number * block + place for number, place in enumerate(places)]
    ends = torch.tensor([0, *counts], device="cpu").cumsum(0)
    inputs = StepInputs(
        input_ids=torch.cat([prompt[s : s + n] for prompt, s, n in zip(prompts, done, counts, strict=True)]),
        positions=torch.cat(places),
        cu_seqlens_q=ends.to(torch.int32),
        context_lens=torch.tensor([s + n for s, n in zip(done, counts, strict=True)], dtype=torch.int32, device="cpu"),
        block_table=torch.tensor([[number, 0] for number in range(len(prompts))], dtype=torch.int32, device="cpu"),
        slot_mapping=torch.cat(slots),
        logit_rows=torch.arange(sum(counts), device="cpu"),
        state_slots=torch.arange(len(prompts), device="cpu"),
        requests=tuple(range(len(prompts))),
    )
    moved = {name: value.to(device) for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    return StepInputs(**{**vars(inputs), **moved})
