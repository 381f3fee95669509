"""What other tests show of attention in Triton's interpreter, on a GPU: as it chooses tiles, copies and pieces itself.

``python -m pytest tests/kernels -m gpu`` runs these and those beside what they belong to.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile import reference
from selective_compile.kernels.one_step import one_step
from tests.kernels.ragged_cases import CASES, WITH_PREFIX, Case, Inputs, exact_ragged, exact_varlen, make_inputs
from tests.kernels.selection_cases import STEPS, Selecting, drawn, paged, selected
from tests.kernels.test_fp8_rows_triton import RUNS as OF_E4M3
from tests.kernels.test_large_heads_triton import SIZED
from tests.kernels.test_latent_attention import arguments as latent_arguments
from tests.kernels.test_latent_attention import case as of_latents
from tests.kernels.test_ragged_attention_bulk_triton import LONG
from tests.kernels.test_ragged_attention_bulk_triton import RUNS as OF_WHOLE_BLOCKS
from tests.kernels.test_ragged_attention_triton import TOLERANCE, nan_filled_outputs  # noqa: F401

launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
latents = pytest.importorskip("selective_compile.kernels.latent_attention_triton")
selections = pytest.importorskip("selective_compile.kernels.selection_triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_filled_outputs")]
HALF = (torch.bfloat16, torch.float16)
# Long enough for several pieces of each tile: decoding, a prompt's rows behind others, and both.
CUT = (((1, 9000), (1, 40), (1, 700)), ((300, 5000), (7, 0)), ((150, 900), *((1, 500),) * 40))
SPLIT = [Case(name=f"{len(each)}_requests", requests=each, query_heads=8, block_size=64) for each in CUT]
SPLIT += [dataclasses.replace(each, window=1000, sinks=0.5, name=f"{each.name}_window") for each in SPLIT]


def moved(given: tuple[Any, ...]) -> list[Any]:
    return [each.cuda() if isinstance(each, Tensor) else each for each in given]


def check(inputs: Inputs, **options: Any) -> None:
    """The results, and what is in the pools behind the step."""
    expected, *pools = exact_ragged(inputs)
    given = moved(inputs.ragged())
    output = launcher.ragged_attention(*given, **options)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=0, atol=TOLERANCE[output.dtype])
    for pool, exact in zip(given[3:5], pools, strict=True) if inputs.key_scales is None else ():
        torch.testing.assert_close(pool.cpu().double(), exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("case", "dtype"), OF_WHOLE_BLOCKS, ids=str)
def test_blocks_of_whole_tiles(case: Case, dtype: torch.dtype) -> None:
    """Read by bulk copies where the device has them."""
    check(make_inputs(case, dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_pieces_as_the_device_plans_them(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    check(inputs)
    check(make_inputs(case, dtype), batch_invariant=True)


def test_layers_of_one_step_share_a_plan() -> None:
    inputs = make_inputs(SPLIT[0], torch.bfloat16)
    expected, *_ = exact_ragged(inputs)
    given = moved(inputs.ragged())
    with one_step():
        outputs = [launcher.ragged_attention(*given) for _ in range(3)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    torch.testing.assert_close(outputs[0].cpu().double(), expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", [*CASES, *WITH_PREFIX], ids=str)
def test_without_a_pool(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    output = launcher.varlen_attention(*moved(inputs.varlen()))
    torch.testing.assert_close(output.cpu().double(), exact_varlen(inputs), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("case", "dtype"), [*OF_E4M3, *((case, torch.bfloat16) for case in (LONG, *SPLIT))], ids=str)
def test_pools_of_e4m3(case: Case, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no numbers of e4m3 below compute capability 8.9")
    check(make_inputs(case, dtype).with_fp8_pools())


@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("case", SIZED, ids=str)
def test_large_heads(case: Case, dtype: torch.dtype) -> None:
    check(make_inputs(case, dtype))
    check(make_inputs(dataclasses.replace(case, block_size=64), dtype))


@pytest.mark.parametrize("window", (0, 500))
@pytest.mark.parametrize("heads", (3, 16, 128))
@pytest.mark.parametrize("requests", CUT, ids=len)
def test_latents(requests: tuple[tuple[int, int], ...], heads: int, window: int) -> None:
    """As large as DeepSeek's, in blocks of whole tiles."""
    case = of_latents("", requests, heads, 576, block_size=64, window=window, scale=0.05)
    inputs = make_inputs(case, torch.bfloat16)
    expected = reference.latent_attention(*latent_arguments(inputs.to(torch.float64)))
    output = latents.latent_attention(*moved(latent_arguments(inputs)))
    torch.testing.assert_close(output.cpu().double(), expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_selections(step: Selecting, dtype: torch.dtype) -> None:
    inputs, weights = drawn(step, dtype)
    selection = selected(inputs, step.count, pool=True)
    if dtype is torch.float32:  # in 16 bits two scores may be rounded to one, of which either is selected
        found = selections.ragged_top_keys(*moved(paged(inputs, weights, step.count)))
        assert torch.equal(found.cpu().sort(-1).values, selection.sort(-1).values)
    exact, own = inputs.to(torch.float64).ragged(), inputs.ragged()
    output = launcher.ragged_attention(*moved((*own, selection)))
    expected = reference.ragged_attention(*exact, selection)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=0, atol=TOLERANCE[dtype])
