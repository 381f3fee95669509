"""What Triton makes of the kernels for GPUs of NVIDIA's, run here: its PTX, on all threads of each launch.

The interpreter knows the kernels' language, this what is made of it: which thread has which element, copies and
products that go on beside the threads and where they are waited for, barriers, and addresses to the byte.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from tests.kernels import test_choose_triton as choosing
from tests.kernels import test_fp8_rows_triton as fp8
from tests.kernels import test_latent_attention_triton as latent
from tests.kernels import test_linear_triton as linear
from tests.kernels import test_ragged_attention_bulk_triton as bulk
from tests.kernels import test_rotary_attention_triton as rotary
from tests.kernels import test_selection_triton as selection
from tests.kernels import test_state_triton as state
from tests.kernels.ragged_cases import CASES, Case, Inputs, make_inputs
from tests.kernels.state_cases import OPS, make_call
from tests.kernels.test_ragged_attention_splits_triton import DRAFTS, split_into
from tests.kernels.test_ragged_attention_triton import compiling, nan_filled_outputs, triton_cache  # noqa: F401

triton = pytest.importorskip("triton")
launches = pytest.importorskip("tests.kernels.ptx.launches")
accesses = pytest.importorskip("tests.kernels.ptx.accesses")
pytestmark = [compiling, pytest.mark.usefixtures("triton_cache", "nan_filled_outputs")]

AMPERE, HOPPER = 80, 90
NAMED = {case.name: case for case in CASES}


@pytest.fixture(params=(AMPERE, HOPPER), ids=("sm_80", "sm_90"))
def processor(request, monkeypatch) -> Any:
    return launches.take_over(monkeypatch, request.param)


@pytest.fixture
def hopper(monkeypatch) -> Any:
    """With bulk copies, and values that are multiplied late however few keys there are."""
    monkeypatch.setattr(bulk.attends, "bulk_copies", lambda device: True)
    monkeypatch.setattr(bulk.attends, "asynchronous_products", lambda device: True)
    monkeypatch.setattr(bulk.tiles, "LATE_KEYS", 1)
    monkeypatch.setattr(latent.latents, "bulk_copies", lambda device: True)
    return launches.take_over(monkeypatch, HOPPER)


def ptx_of(processor: Any) -> str:
    return "".join(compiled.asm["ptx"] for compiled in processor.launched)


ATTENTION = ("mixed", "group_of_7", "window_over_blocks", "head_size_80", "block_size_5", "everything")
ATTENTION += ("prefix_and_all_that_goes_with_it", "no_request")


@pytest.mark.sampled("processor")
@pytest.mark.parametrize("name", ATTENTION)
def test_ragged_attention(name, processor):
    bulk.check(make_inputs(NAMED[name], torch.bfloat16))
    assert processor.launched


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_ragged_attention_of_other_numbers(dtype, processor):
    bulk.check(make_inputs(NAMED["mixed"], dtype))


@pytest.mark.parametrize("name", ("mixed", "everything"))
def test_pools_of_8_bits(name, hopper):
    fp8.check(dataclasses.replace(NAMED[name], block_size=64, key_size=32, value_size=32), torch.bfloat16)
    assert "cvt.rn.f16x2.e4m3x2" in ptx_of(hopper)


LARGE = {"query_heads": 4, "kv_heads": 1, "key_size": 128, "value_size": 128, "block_size": 64, "scale": 0.09}
LONG = Case(name="long", requests=((40, 150), (70, 0)), **LARGE)
COPIED = [
    LONG,
    dataclasses.replace(LONG, name="whole_blocks", requests=((40, 250), (130, 0)), block_size=128),
    dataclasses.replace(LONG, name="window", window=100, block_size=128),
    dataclasses.replace(LONG, name="sinks_and_slopes", sinks=0.5, slopes=True, softcap=5.0),
    dataclasses.replace(LONG, name="prefix", prefix=90),
    dataclasses.replace(LONG, name="chunk_of_blocks_of_128", block_size=128, chunk=80),
    dataclasses.replace(LONG, name="decode", requests=((1, 190), (1, 3), (1, 64))),
    dataclasses.replace(LONG, name="other_sizes", key_size=192, value_size=128, kv_heads=4),
]


@pytest.mark.parametrize("case", COPIED, ids=str)
def test_tiles_that_are_copied_at_once(case, hopper):
    bulk.check(make_inputs(case, torch.bfloat16))
    assert "cp.async.bulk.tensor" in ptx_of(hopper)
    assert ("wgmma" in ptx_of(hopper)) is (case.name != "decode")


@pytest.mark.parametrize("case", [DRAFTS, dataclasses.replace(LONG, sinks=0.5)], ids=str)
def test_splits_and_their_merge(case, hopper, monkeypatch):
    monkeypatch.setattr(bulk.attends, "split_config", split_into(1))
    bulk.check(make_inputs(dataclasses.replace(case, block_size=64), torch.bfloat16))
    assert len({compiled.metadata.name for compiled in hopper.launched}) == 4


def asked_for(inputs: Inputs, ahead: int) -> list[tuple[tuple[int, int], int, int]]:
    """Of each request that has rows the last iteration of its keys and values, and those from the first on, by each of
    its heads."""
    found, rows = [], inputs.cu_seqlens_q.diff().tolist()
    for request, context in enumerate(inputs.context_lens.tolist()):
        if not rows[request]:
            continue
        last = (context - 1) // 64
        for iteration in {last, *range(min(ahead - 1, last))}:
            block = int(inputs.block_table[request, iteration * 64 // inputs.key_pool.shape[2]])
            for pool in (inputs.key_pool, inputs.value_pool):
                for head in range(pool.shape[1]):
                    place = pool[block, head, iteration * 64 % pool.shape[2]].storage_offset() * pool.itemsize
                    storage = pool.untyped_storage()
                    found.append(((storage.data_ptr(), storage.nbytes()), place, 64 * pool.shape[3] * pool.itemsize))
    return sorted(found)


@pytest.mark.parametrize("changes", ({}, {"block_size": 128}, {"value_size": 64, "kv_heads": 2}), ids=str)
@pytest.mark.parametrize("iterations", (2, 4))
def test_the_cache_is_asked_for_what_is_read_first(iterations, changes, hopper, monkeypatch):
    chosen = bulk.attends.tile_config
    monkeypatch.setattr(
        bulk.attends, "tile_config", lambda **step: dataclasses.replace(chosen(**step), ahead=iterations)
    )
    case = dataclasses.replace(LONG, requests=((1, 250), (1, 3), (1, 64), (0, 7)), padding_rows=1, **changes)
    inputs = make_inputs(case, torch.bfloat16)
    bulk.check(inputs)
    assert sorted(hopper.prefetched) == asked_for(inputs, iterations)


def test_pieces_ask_for_their_own_keys(hopper, monkeypatch):
    chosen = bulk.attends.tile_config
    monkeypatch.setattr(bulk.attends, "tile_config", lambda **step: dataclasses.replace(chosen(**step), ahead=4))
    monkeypatch.setattr(bulk.attends, "split_config", split_into(1))
    inputs = make_inputs(dataclasses.replace(LONG, requests=((1, 250), (1, 70))), torch.bfloat16)
    bulk.check(inputs)
    assert sorted(hopper.prefetched) == asked_for(inputs, 8)


WAITING = ("selective_scan", "ssd", "gated_delta_rule", "mlstm")
LEFT_OUT = {
    "a wait for products": r"wgmma\.wait_group\.sync\.aligned 0;",
    "a fence of products' registers": r"wgmma\.fence\.sync\.aligned;",
    "a wait for copies": r"mbarrier\.try_wait\.[^;]*;\s+@!complete bra\.uni waitLoop;",
    "asking again for copies": r"@!complete bra\.uni waitLoop;",
    "a fence": r"fence\.proxy\.async\.shared::cta;",
    "a barrier of threads": r"bar\.sync\s+0;",
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_what_is_left_out_is_found(left_out, hopper):
    """Not each is needed: of some two are one behind the other."""
    inputs = make_inputs(dataclasses.replace(LONG, requests=((40, 90),), name=""), torch.bfloat16)
    expected = bulk.launcher.ragged_attention(*inputs.ragged())
    (ptx,) = {each.asm["ptx"] for each in hopper.launched if each.metadata.name == "attention_kernel"}
    missed = 0
    places = list(re.finditer(LEFT_OUT[left_out], ptx))
    for place in places[:8]:
        cut = ptx[: place.start()] + ptx[place.end() :]
        hopper.edit = lambda text, cut=cut: cut if text == ptx else text
        try:
            missed += torch.equal(bulk.launcher.ragged_attention(*inputs.ragged()), expected)
        except accesses.Fault:
            continue
    assert missed < len(places[:8])
    if "copies" in left_out:
        assert not missed


def test_no_barrier_at_all(processor):
    """Of kernels of which each has some."""
    processor.edit = lambda ptx: re.sub(r"bar\.sync\s+0;", "", ptx)
    states = [make_call(case, torch.float32) for case in state.SHORT if case.name == "plain" and case.op in WAITING]
    calls = [lambda each=each: state.check(each) for each in states]
    calls.append(lambda: bulk.check(make_inputs(NAMED["mixed"], torch.bfloat16)))
    calls.append(lambda: linear.test_odd_sizes(33, torch.bfloat16, None))
    calls.append(lambda: selection.test_the_best_keys(selection.FEWER[0], torch.float32))
    for call in calls:
        with pytest.raises(accesses.Fault, match="no barrier"):
            call()
    assert len(calls) == 3 + len(WAITING)


@pytest.mark.sampled("processor")
@pytest.mark.parametrize("name", ("mixed", "window", "sinks"))
def test_latents(name, processor):
    (each,) = (each for each in latent.CASES if each.name == name)
    latent.check("triton", make_inputs(each, torch.bfloat16))
    assert processor.launched


@pytest.mark.parametrize("score", ({"softcap": 2.0}, {"chunk": 40}, {"prefix": 19}), ids=str)
def test_latents_that_the_ordinary_kernel_attends_to(score, hopper, monkeypatch):
    """Their keys are split, so that a plan is read before the kernel in front of attention has ended."""
    monkeypatch.setattr(bulk.attends, "split_config", split_into(1))
    (each,) = (each for each in latent.CASES if each.name == "mixed")
    latent.check("triton", make_inputs(dataclasses.replace(each, **score), torch.bfloat16))
    assert any(compiled.metadata.name == "_plan_kernel" for compiled in hopper.launched)


@pytest.mark.parametrize("pools", (torch.bfloat16, torch.float8_e4m3fn), ids=str)
def test_latents_that_are_copied_at_once(pools, hopper):
    (each,) = (each for each in latent.CASES if each.name == "as_large_as_deepseek")
    inputs = make_inputs(dataclasses.replace(each, block_size=64), torch.bfloat16)
    latent.check("triton", inputs if pools is torch.bfloat16 else inputs.with_fp8_pools())
    assert "cp.async.bulk.tensor" in ptx_of(hopper)


@pytest.mark.sampled("processor")
@pytest.mark.parametrize("run", [rotary.RUNS[7], rotary.RUNS[-2], rotary.RUNS[-1]], ids=str)
def test_rotary_attention(run, processor):
    rotary.test_rotary_attention(*run, None)
    assert processor.launched


def test_keys_are_selected(processor):
    selection.test_the_best_keys(selection.FEWER[0], torch.float32)
    selection.test_attention_to_selected_keys(selection.FEWER[0], torch.bfloat16)
    assert processor.launched


@pytest.mark.sampled("processor")
@pytest.mark.parametrize("asked_for", choosing.ASKED[:4], ids=str)
def test_tokens_are_chosen(asked_for, processor, monkeypatch):
    choosing.test_what_may_be_left_is_what_is_drawn_from(asked_for, 5, monkeypatch)
    assert processor.launched


def test_the_token_that_is_chosen_is_marked(processor):
    choosing.test_what_is_chosen_is_marked_and_nothing_else()
    assert processor.launched


@pytest.mark.sampled("processor")
@pytest.mark.parametrize("op", OPS)
def test_states(op, processor):
    (case,) = (case for case in state.SHORT if (case.op, case.name) == (op, "plain"))
    state.check(make_call(case, torch.float32))
    assert processor.launched


@pytest.mark.sampled("processor")
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_linear(dtype, processor):
    linear.test_odd_sizes(33, dtype, None)
    assert processor.launched
