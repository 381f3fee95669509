"""Batch assembly: the tensors of a step, against a version written one token at a time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selective_compile.runtime.batch import BatchAssembler
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.scheduler import Scheduler
from selective_compile.step import StepInputs
from tests.runtime.simulated import CPU, check_inputs


def make_assembler(max_blocks: int = 16, block_size: int = 4, max_requests: int = 4) -> BatchAssembler:
    return BatchAssembler(
        token_budget=16, max_requests=max_requests, block_size=block_size, max_blocks=max_blocks, device=CPU
    )


def check_against_the_slow_way(plan: StepPlan, inputs: StepInputs, block_size: int) -> None:
    check_inputs(inputs)
    row, sampled = 0, []
    for number, share in enumerate(plan.shares):
        assert inputs.cu_seqlens_q[number] == row
        blocks = list(share.state.blocks)
        for position in range(share.start, share.start + share.num_tokens):
            offset = share.state.id_offset if position >= share.state.prompt_length else 0
            assert inputs.input_ids[row] == share.state.tokens[position] + offset
            assert inputs.positions[row] == position
            slot = blocks[position // block_size] * block_size + position % block_size
            assert inputs.slot_mapping[row] == slot
            row += 1
        assert inputs.cu_seqlens_q[number + 1] == row
        assert inputs.context_lens[number] == share.start + share.num_tokens
        width = inputs.block_table.shape[1]
        assert inputs.block_table[number].tolist() == blocks + [0] * (width - len(blocks))
        sampled += [row - 1] * share.samples
    assert inputs.logit_rows.tolist() == sampled + [0] * (2 - len(sampled))
    empty = inputs.context_lens.shape[0] - len(plan.shares)
    assert inputs.cu_seqlens_q[len(plan.shares) :].tolist() == [row] * (empty + 1)
    assert inputs.context_lens[len(plan.shares) :].tolist() == [0] * empty


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=6),
    block_size=st.integers(1, 5),
    token_budget=st.integers(1, 16),
)
def test_random_plans(prompts: list[list[int]], block_size: int, token_budget: int) -> None:
    pool = BlockPool(num_blocks=40)
    scheduler = Scheduler(pool, token_budget=token_budget, max_requests=4, block_size=block_size)
    assembler = make_assembler(max_blocks=40, block_size=block_size)
    for number, prompt in enumerate(prompts):
        scheduler.add(RequestState(number, number, prompt, max_new_tokens=9, id_offset=number % 3 * 1000))
    for step in range(16):
        plan = scheduler.schedule()
        if not plan.shares:
            break
        check_against_the_slow_way(plan, assembler.assemble(plan), block_size)
        for share in plan.shares:
            scheduler.advance(share, step if share.samples else None)
            if share.state.generated == 1 + share.state.number:
                scheduler.remove(share.state)


def test_one_token_of_one_request_is_padded_to_two_of_everything() -> None:
    scheduler = Scheduler(BlockPool(3), token_budget=4, max_requests=1, block_size=4)
    scheduler.add(RequestState("a", 0, [9], max_new_tokens=1))
    inputs = make_assembler(max_requests=1).assemble(scheduler.schedule())
    assert inputs.input_ids.tolist() == [9, 0]
    assert inputs.positions.tolist() == [0, 0]
    assert inputs.slot_mapping.tolist() == [0, -1]
    assert inputs.cu_seqlens_q.tolist() == [0, 1, 1]
    assert inputs.context_lens.tolist() == [1, 0]
    assert inputs.block_table.tolist() == [[0, 0], [0, 0]]
    assert inputs.logit_rows.tolist() == [0, 0]


def test_the_buffers_are_allocated_once() -> None:
    scheduler = Scheduler(BlockPool(40), token_budget=16, max_requests=4, block_size=4)
    scheduler.add(RequestState("a", 0, [1, 2, 3], max_new_tokens=2))
    assembler = make_assembler()
    places = set()
    for _ in range(3):
        plan = scheduler.schedule()
        inputs = assembler.assemble(plan)
        tensors = {
            name: tensor
            for name, tensor in vars(inputs).items()
            if name not in ("requests", "other_tables", "state_slots")
        }
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
        places.add(tuple(tensor.data_ptr() for tensor in tensors.values()))
        scheduler.advance(plan.shares[0], 4)
    assert len(places) == 1


@settings(max_examples=30, deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=6))
def test_each_row_is_a_request_of_a_batch_invariant_step(prompts: list[list[int]]) -> None:
    """And each padding row has an empty one: kernels see as many requests as rows, whatever the step."""
    scheduler = Scheduler(BlockPool(num_blocks=40), token_budget=16, max_requests=4, block_size=4)
    assembler = BatchAssembler(
        token_budget=16, max_requests=4, block_size=4, max_blocks=40, device=CPU, batch_invariant=True
    )
    for number, prompt in enumerate(prompts):
        scheduler.add(RequestState(number, number, prompt, max_new_tokens=1))
    for step in range(8):
        plan = scheduler.schedule()
        inputs = assembler.assemble(plan)
        tokens = sum(share.num_tokens for share in plan.shares)
        rows = len(inputs.input_ids)
        assert len(inputs.context_lens) == len(inputs.block_table) == rows
        assert inputs.cu_seqlens_q.tolist() == [min(row, tokens) for row in range(rows + 1)]
        own = [share.state for share in plan.shares for _ in range(share.num_tokens)]
        assert inputs.context_lens.tolist() == (inputs.positions[:tokens] + 1).tolist() + [0] * (rows - tokens)
        for row, state in enumerate(own):
            assert inputs.block_table[row, : len(state.blocks)].tolist() == list(state.blocks)
        assert not inputs.block_table[tokens:].any()
        for share in plan.shares:
            scheduler.advance(share, step if share.samples else None)
            if share.samples:
                scheduler.remove(share.state)
        if not scheduler.has_work:
            break
