"""Keys split over several programs and merged: the numbers in Triton's interpreter, and compiled without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.ragged_cases import CASES, DECODE, Case, cases, exact_ragged, make_inputs
from tests.kernels.test_ragged_attention_triton import (
    FEATURES,
    TOLERANCE,
    Recorder,
    compile_attention,
    compiling,
    nan_filled_outputs,  # noqa: F401
    triton_cache,  # noqa: F401
)

triton = pytest.importorskip("triton")
launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
attends = pytest.importorskip("selective_compile.kernels.ragged_attention_attend_triton")
cuts = pytest.importorskip("selective_compile.kernels.ragged_attention_cut_triton")
merges = pytest.importorskip("selective_compile.kernels.ragged_attention_merge_triton")
writes = pytest.importorskip("selective_compile.kernels.ragged_attention_write_triton")
plans = pytest.importorskip("selective_compile.kernels.split_plan_triton")
tiles = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

NAMES = ("decode", "only_padding", "no_request", "window_over_blocks", "chunk_of_two_blocks", "chunk_and_window")
NAMES += ("sinks_far_above_the_scores", "wide_values", "everything", "strided", "prefix", "prefix_longer_than_most")
HALF_PRECISION = ("decode",)
RUNS = [(case, torch.float32) for case in CASES if case.name in NAMES]
RUNS += [(case, dtype) for case in CASES if case.name in HALF_PRECISION for dtype in (torch.bfloat16, torch.float16)]
# Rows of drafts, which a tile has several of: the first ones see none of the last split's keys.
DRAFTS = Case(name="drafts", requests=((3, 200), (8, 57), (1, 130), (0, 40), (2, 14)), query_heads=2, kv_heads=1)
# Groups of 40 and of 37 heads, which tiles of 32 rows have in two parts and head by head.
PARTS = [
    Case(
        name=f"group_of_{group}", requests=((1, 70), (1, 9)), query_heads=2 * group, kv_heads=2, key_size=264, sinks=0.5
    )
    for group in (40, 37)
]
RUNS += [(case, dtype) for case in PARTS for dtype in (torch.bfloat16, torch.float32)]
RUNS += [(dataclasses.replace(PARTS[0], requests=((6, 5), (1, 30)), slopes=True), torch.float32)]
RUNS += [(DRAFTS, torch.bfloat16), (dataclasses.replace(DRAFTS, window=18, sinks=0.5), torch.float16)]
# Of whose rows the first ones see keys of the prefix behind them, in other splits, and the request with 57 tokens none.
RUNS += [(dataclasses.replace(DRAFTS, prefix=63, block_size=8), torch.float32)]


def split_into(length: int, slots: int = 24):
    """In place of the choice: splits of so many keys, or of an iteration's, as far as there are slots for them."""
    return lambda **sizes: tiles.SplitConfig(slots=slots, shortest=length)


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_shortest_splits(case, dtype, nan_filled_outputs, monkeypatch):  # noqa: F811
    """Partial results hold NaN before they are written, so that what is read in vain shows."""
    monkeypatch.setattr(attends, "split_config", split_into(1))
    inputs = make_inputs(case, dtype)
    expected, *_ = exact_ragged(inputs)
    output = launcher.ragged_attention(*inputs.ragged())
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@settings(max_examples=5, deadline=None)
@given(case=cases(), slots=st.integers(1, 30), length=st.integers(1, 100))
def test_the_number_of_splits_changes_nothing(case: Case, slots: int, length: int) -> None:
    few = tuple((rows % 6, past) for rows, past in case.requests)
    inputs = make_inputs(dataclasses.replace(case, requests=few), torch.float32)
    whole = launcher.ragged_attention(*inputs.ragged(), batch_invariant=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attends, "split_config", split_into(length, slots))
        split = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(split, whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("requests", [((1, 600), (1, 511), (1, 512)), ((1, 600), (1, 511)), ((1, 600),)], ids=len)
def test_more_splits_than_are_merged_at_once(requests, nan_filled_outputs, monkeypatch):  # noqa: F811
    """By one warp, and by four of a step of one row or two."""
    monkeypatch.setattr(attends, "split_config", split_into(16, slots=200))
    inputs = make_inputs(Case(name="", requests=requests, query_heads=2, kv_heads=1), torch.float32)
    output = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(output.double(), exact_ragged(inputs)[0], rtol=0, atol=2e-5)


def test_rows_of_many_tiles_are_split(nan_filled_outputs, monkeypatch):  # noqa: F811
    """The first tiles see fewer keys than the last, and use fewer splits, down to one alone."""
    monkeypatch.setattr(attends, "split_config", split_into(16))
    for each in (
        Case(name="", requests=((70, 10), (1, 90), (25, 0)), query_heads=2, kv_heads=1, padding_rows=3),
        Case(name="", requests=((40, 130),), query_heads=2, kv_heads=1, window=50, sinks=0.5),
    ):
        inputs = make_inputs(each, torch.float32)
        output = launcher.ragged_attention(*inputs.ragged())
        torch.testing.assert_close(output.double(), exact_ragged(inputs)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("group", "requests", "programs", "at_once"),
    [
        (1, ((1, 70), (4, 90), (1, 5), (1, 30)), 4, 1),
        (4, ((4, 90), (1, 130), (0, 3)), 1, 1),
        (2, ((19, 100), (2, 90)), 4, 4),
        (4, ((7, 200),), 2, 4),
        (16, ((3, 130),), 1, 2),
    ],
)
def test_a_program_merges_a_few_rows(group, requests, programs, at_once, nan_filled_outputs, monkeypatch):  # noqa: F811
    """One at a time where most tiles have one; the last tile of a request is not full."""
    monkeypatch.setattr(attends, "split_config", split_into(16))
    case = Case(name="", requests=requests, query_heads=2 * group, kv_heads=2, padding_rows=1)
    inputs = make_inputs(case, torch.float32)
    launches = recorded(
        lambda: launcher.ragged_attention(*inputs.ragged()), lambda kernel, grid, args, _: (kernel, grid, args)
    )
    names = [parameter.name for parameter in merges._merge_kernel.params]
    (told,) = (dict(zip(names, args, strict=False)) for kernel, _, args in launches if kernel is merges._merge_kernel)
    assert (told["num_items"], told["BLOCK_R"]) == (programs * told["num_divided"] * 2 * group, at_once)
    (grid,) = (grid for kernel, grid, _ in launches if kernel is merges._merge_kernel)
    assert grid == (min(told["num_items"], 6 if at_once > 1 else 8),)  # of one processor
    output = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(output.double(), exact_ragged(inputs)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("processors,pieces", [(2, 3), (8, 5)])  # of 512 keys at least, or of 256
def test_the_choice_splits_a_long_context_by_itself(processors, pieces, nan_filled_outputs, monkeypatch):  # noqa: F811
    """And a wide block table, of which short requests use little."""
    monkeypatch.setattr(attends, "processors", lambda device: processors)
    inputs = make_inputs(Case(name="", requests=((1, 1100), (1, 3), (0, 9)), query_heads=2, kv_heads=1), torch.float32)
    divided = []

    def noted(output, parts, *rest, **options):
        divided.append(int((~parts[1][:, 0, 0].isnan()).sum()))
        merges.merge(output, parts, *rest, **options)

    monkeypatch.setattr(cuts, "merge", noted)
    output = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(output.double(), exact_ragged(inputs)[0], rtol=0, atol=2e-5)
    assert divided == [pieces]


def recorded(run, launch=lambda kernel, grid, args, options: grid) -> list:
    recorder = Recorder(launch)
    with pytest.MonkeyPatch.context() as patch:
        for module in (attends, writes, merges, plans):
            patch.setattr(module, "on_device", recorder)
        run()
    return recorder.seen


def with_wide_table(inputs, blocks: int):
    table = inputs.block_table.new_zeros(len(inputs.block_table), blocks)
    table[:, : inputs.block_table.shape[1]] = inputs.block_table
    return dataclasses.replace(inputs, block_table=table)


def test_the_grid_does_not_depend_on_lengths():
    """Nor on the width of the block table: on T and N alone."""
    seen = []
    for requests in (((40, 0), (1, 3), (1, 90)), ((1, 0), (1, 3), (40, 9))):
        for blocks in (30, 9000):
            inputs = with_wide_table(make_inputs(Case(name="", requests=requests), torch.bfloat16), blocks)
            seen.append(recorded(lambda inputs=inputs: launcher.ragged_attention(*inputs.ragged())))
    assert len(seen[0]) == 4
    assert all(each == seen[0] for each in seen)


def test_a_batch_invariant_step_is_whole_at_any_width():
    inputs = make_inputs(Case(name="", requests=DECODE), torch.float32)
    seen = []
    for blocks in (20, 9000):
        wide = with_wide_table(inputs, blocks).ragged()
        seen.append(recorded(lambda wide=wide: launcher.ragged_attention(*wide, batch_invariant=True)))
    assert seen[0] == seen[1] and len(seen[0]) == 2  # neither a plan nor a merge


@compiling
def test_steps_of_every_shape_share_two_compiled_kernels_and_three_merges(monkeypatch):
    """Low and tall tiles, and where there is one row or two: what is known of the lengths, and how many pieces there
    are, may not cause a recompile."""
    monkeypatch.setattr(triton.runtime.driver, "_active", ahead.NoDevice())
    monkeypatch.setattr(attends, "processors", lambda device: 132)
    compiled = set()

    def launch(kernel, grid, args, rest):
        return kernel, kernel.warmup(*args, grid=grid, **rest).hash

    for requests, blocks in ((((3, 5), (1, 20)), 40), (((64, 0),), 64), (((1, 0),) * 16, 400), (((1, 0),), 8192)):
        case = Case(name="", requests=requests, key_size=64, value_size=64)
        inputs = with_wide_table(make_inputs(case, torch.bfloat16), blocks)
        compiled |= set(recorded(lambda inputs=inputs: launcher.ragged_attention(*inputs.ragged()), launch))
    kinds = [kernel for kernel, _ in compiled]
    kernels = (attends.attention_kernel, merges._merge_kernel, plans._plan_kernel, writes._write_kernel)
    assert [kinds.count(each) for each in kernels] == [2, 3, 2, 1]


SPLITS = {
    "decode": ("bf16", 128, 8, (), {}),
    "few_rows": ("bf16", 128, 512, (), {}),
    "few_rows_float32": ("fp32", 128, 512, (), {}),
    "window": ("bf16", 128, 512, (), {"WINDOW": 4096}),
    "window_and_sinks": ("bf16", 128, 512, ("sinks",), {"WINDOW": 2048}),
    "prefix": ("bf16", 128, 512, (), {"PREFIX": 300}),
    "everything": ("bf16", 128, 512, *FEATURES["everything"][:2]),
}


@compiling
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_splits_compile_ahead_of_time_without_spills(target, name, tmp_path):
    element, size, rows, given_tensors, constants = SPLITS[name]
    compiled = compile_attention(target, element, size, rows, given=given_tensors, split=True, **constants)
    ahead.assert_ships(compiled, tmp_path)


def compile_merge(target, *, size: int, block_q: int, num_rows: int):
    """Of a step of eight requests; tiles of one row are those of latents, which 128 heads read."""
    heads = 128 if block_q == 1 else 32
    types = {"output": "*bf16", "divided": "*i32"} | dict.fromkeys(("sums", "maxima", "totals"), "*fp32")
    block_dv = triton.next_power_of_2(size)
    how = merges.merge_config(block_q, block_dv, num_rows=num_rows, num_requests=8)
    constants = {"HEADS": heads, "VALUE_SIZE": size, "BLOCK_Q": block_q, "ROWS": merges.ROWS, "BLOCK_R": how.rows}
    constants |= {"BLOCK_DV": block_dv, "BLOCK_S": how.splits}
    options = how.options(block_dv, target.backend)
    return ahead.compile_ahead(merges._merge_kernel, target, types, constants, **options)


FEWEST, LOW, TALL = 2, 8, 512  # rows of a step
MERGED = [*((size, 4, rows) for size in (64, 80, 128, 256, 512, 576) for rows in (FEWEST, LOW))]
MERGED += [
    (512, 1, LOW),
    (512, 1, FEWEST),
    (64, 32, TALL),
    (80, 32, TALL),
    (128, 32, TALL),
    (256, 2, TALL),
    (256, 32, TALL),
    (576, 16, TALL),
]


@compiling
@pytest.mark.parametrize(("size", "block_q", "num_rows"), MERGED)
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_the_merge_compiles_ahead_of_time_without_spills(target, size, block_q, num_rows, tmp_path):
    ahead.assert_ships(compile_merge(target, size=size, block_q=block_q, num_rows=num_rows), tmp_path)


@compiling
@pytest.mark.parametrize(("num_rows", "waiting"), [(FEWEST, True), (LOW, False), (TALL, False)])
def test_a_warp_that_merges_rows_by_itself_waits_for_no_other(num_rows, waiting):
    block_q = 32 if num_rows == TALL else 4
    compiled = compile_merge(ahead.TARGETS[1], size=128, block_q=block_q, num_rows=num_rows)
    assert ("bar.sync" in compiled.asm["ptx"]) is waiting


@pytest.mark.parametrize("num_rows", (1, 2, 3, 30))
@pytest.mark.parametrize("size", (16, 128, 192, 512))
def test_a_program_has_numbers_of_a_few_registers(num_rows, size):
    """At most 64 for each of its threads; four warps have what a step of one row or two is split into."""
    block_dv = triton.next_power_of_2(size)
    how = merges.merge_config(4, block_dv, num_rows=num_rows, num_requests=num_rows)
    assert how.rows == 1 and how.warps == (4 if num_rows <= 2 else 1)
    assert 1 <= how.splits and how.splits * block_dv <= 64 * 32 * how.warps
    assert block_dv > 128 or how.splits == {1: 16, 4: 32}[how.warps]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, DRAFTS], ids=str)
def test_shortest_splits_on_a_gpu(case, dtype, nan_filled_outputs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(attends, "split_config", split_into(1))
    inputs = make_inputs(case, dtype)
    on_gpu = [argument.cuda() if isinstance(argument, torch.Tensor) else argument for argument in inputs.ragged()]
    output = launcher.ragged_attention(*on_gpu)
    torch.testing.assert_close(output.cpu().double(), exact_ragged(inputs)[0], rtol=0, atol=TOLERANCE[dtype])
