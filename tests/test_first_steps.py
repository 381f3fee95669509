"""The steps that a program makes before there are requests: none of their sizes can be taken for another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile import ops
from selective_compile.first_steps import may_be_followed, run_first_steps
from selective_compile.isolated_op import isolated_rows
from selective_compile.step import StepInputs


def test_sizes_of_a_step_differ_and_it_fits_together() -> None:
    steps: list[StepInputs] = []

    def run(inputs: StepInputs, pools: object) -> Tensor:
        assert [[tuple(pool.shape) for pool in pair] for pair in pools] == [[(4, 2, 8, 16), (4, 2, 8, 5)]]  # type: ignore[attr-defined]
        steps.append(inputs)
        return torch.empty(0)

    run_first_steps(run, [(2, (16, 5), torch.float32)], num_tables=2)
    assert len({step.input_ids.shape for step in steps[1:]}) == 2, "two that are compared"
    for step in steps:
        (rows,), (requests, width), (wanted,) = step.input_ids.shape, step.block_table.shape, step.logit_rows.shape
        assert len({rows, requests, width, wanted}) == 4
        assert step.slot_mapping.shape == step.positions.shape == (rows,) and len(step.other_tables) == 1
        assert step.cu_seqlens_q.diff().tolist() == step.context_lens.tolist()
        assert set(step.slot_mapping.tolist()) == {
            8 * block + place
            for block, count in zip(step.block_table[:, 0].tolist(), step.context_lens.tolist(), strict=True)
            for place in range(count)
        }


@pytest.mark.parametrize("followed", [True, False])
def test_which_graphs_may_be_followed(followed: bool) -> None:
    def of_ours(x: Tensor) -> Tensor:
        return ops.linear(x.sin(), x)

    def of_somebodys_module(x: Tensor) -> Tensor:
        return isolated_rows([x], 0, 0, 0, "[('float32', ('S', 3))]")[0]

    graph = make_fx(of_ours if followed else of_somebodys_module, tracing_mode="fake")(torch.randn(3, 3)).graph
    assert may_be_followed(graph) == followed
