"""Tiles read by bulk copies, as on Hopper and Blackwell: the numbers in Triton's interpreter, and what is compiled."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from tests.kernels.ragged_cases import CASES, Case, Inputs, exact_ragged, make_inputs
from tests.kernels.test_ragged_attention_splits_triton import DRAFTS, split_into
from tests.kernels.test_ragged_attention_triton import (
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
tiles = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
machine = pytest.importorskip("tests.kernels.machine_code")
HOPPER = ahead.TARGETS[1]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

NAMES = ("mixed", "decode", "only_padding", "no_request", "group_of_7", "window_over_blocks", "chunk_and_window")
NAMES += ("narrow_values", "wide_values", "everything", "head_size_80", "prefix", "prefix_and_all_that_goes_with_it")
LONG = Case(name="long", requests=((70, 150), (1, 190), (130, 0)), block_size=128, query_heads=8)
RUNS = [(dataclasses.replace(case, block_size=64), torch.bfloat16) for case in CASES if case.name in NAMES]
RUNS += [(LONG, torch.float16), (dataclasses.replace(LONG, window=90, name="long_window"), torch.bfloat16)]
# Heads of a power of two, whose tall tiles have iterations of all slots of a block.
WHOLE = dataclasses.replace(LONG, requests=((70, 250), (1, 190), (130, 0)), key_size=32, value_size=32, name="whole")
RUNS += [(WHOLE, torch.bfloat16), (dataclasses.replace(WHOLE, window=90, name="whole_window"), torch.float16)]


@pytest.fixture
def launches(monkeypatch) -> list:
    """The device is as Hopper is; whether each launch of the attention kernel made use of bulk copies."""
    monkeypatch.setattr(attends, "bulk_copies", lambda device: True)
    monkeypatch.setattr(attends, "asynchronous_products", lambda device: True)
    monkeypatch.setattr(tiles, "LATE_KEYS", 1)
    made, described = [], attends._descriptors

    def noted(*args):
        found = described(*args)
        made.append(all(each is not None for each in found))
        return found

    monkeypatch.setattr(attends, "_descriptors", noted)
    return made


def check(inputs: Inputs) -> None:
    expected, *_ = exact_ragged(inputs)
    output = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[output.dtype])


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_ragged_attention(case, dtype, launches, nan_filled_outputs):  # noqa: F811
    """What no row sees holds NaN, slots behind the context in blocks that are read among it."""
    check(make_inputs(case, dtype))
    assert launches == [True]


@pytest.mark.parametrize("run", RUNS[-3:], ids=str)
def test_ragged_attention_of_blackwell(run, launches, nan_filled_outputs, monkeypatch):  # noqa: F811
    """Values are multiplied in their own iteration."""
    monkeypatch.setattr(attends, "asynchronous_products", lambda device: False)
    check(make_inputs(*run))
    assert launches == [True]


@pytest.mark.parametrize("case", [DRAFTS, dataclasses.replace(LONG, sinks=0.5, slopes=True)], ids=str)
def test_splits(case, launches, nan_filled_outputs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(attends, "split_config", split_into(1))
    check(make_inputs(dataclasses.replace(case, block_size=64), torch.bfloat16))
    assert launches == [True]


def test_what_no_descriptor_can_tell_is_read_by_addresses(launches):
    """Blocks of less than a tile, rows that are no multiple of 16 bytes, pools that begin at another address; float32,
    which is not multiplied from where it would be copied to."""
    case = Case(name="", requests=((3, 60), (1, 20)), block_size=64)
    check(make_inputs(dataclasses.replace(case, block_size=32), torch.bfloat16))
    check(make_inputs(dataclasses.replace(case, value_size=20), torch.bfloat16))
    check(make_inputs(case, torch.float32))
    inputs = make_inputs(case, torch.bfloat16)
    pool = torch.cat([torch.zeros(1), inputs.key_pool.flatten()]).to(torch.bfloat16)[1:].view(inputs.key_pool.shape)
    check(dataclasses.replace(inputs, key_pool=pool))
    check(make_inputs(dataclasses.replace(case, key_size=264), torch.bfloat16))
    assert launches == [False] * 5


CAPABILITIES = {(8, 0): (False, False), (9, 0): (True, True), (10, 3): (True, False), (12, 0): (False, False)}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_device_says_what_it_has(capability, monkeypatch):
    asked = (tiles.bulk_copies, tiles.asynchronous_products)
    for each in asked:
        each.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert tuple(each(torch.device("cuda", 55)) for each in asked) == CAPABILITIES[capability]
    assert not any(each(torch.device("cpu")) for each in asked)
    for each in asked:
        each.cache_clear()


@compiling
def test_steps_of_every_shape_share_two_compiled_kernels(launches, monkeypatch):
    """Descriptors of pools of any number of blocks among them; and none is made on the device, which would take memory
    that somebody has to allocate."""
    monkeypatch.setattr(triton.runtime.driver, "_active", ahead.NoDevice())
    recorder = Recorder(lambda kernel, grid, args, rest: kernel.warmup(*args, grid=grid, **rest))
    monkeypatch.setattr(attends, "on_device", recorder)
    monkeypatch.setattr(launcher, "write", lambda *args: None)
    for requests in (((3, 5), (1, 20)), ((64, 300),), ((1, 0),) * 16, ((1, 97), (0, 0), (8, 30))):
        case = Case(name="", requests=requests, key_size=64, value_size=64, block_size=64)
        launcher.ragged_attention(*make_inputs(case, torch.bfloat16).ragged())
    assert launches == [True] * 4
    compiled = {variant.hash: variant for variant in recorder.seen}
    assert len(compiled) == 2
    for variant in compiled.values():
        assert "cp.async.bulk.tensor" in variant.asm["ptx"]
        assert variant.metadata.global_scratch_size == 0


WHOLE_BLOCKS = {"bytes_per_element": 2, "bulk": True, "late": True, "most": True, "num_requests": 8, "num_rows": 512}
WHOLE_BLOCKS |= {"group": 4, "key_size": 128, "value_size": 128, "block_size": 128}
WITH_FEWER_KEYS: list[dict[str, Any]] = [
    *({"num_rows": 8}, {"narrow": True}, {"bytes_per_element": 4}, {"slopes": True}, {"most": False}),
    *({"block_size": 64}, {"group": 6}, {"group": 256}, {"key_size": 96}, {"key_size": 256, "value_size": 256}),
]


@pytest.mark.parametrize("size", (64, 128))
def test_an_iteration_has_the_keys_of_a_whole_block_and_values_are_late(size: int) -> None:
    asked = WHOLE_BLOCKS | {"key_size": size, "value_size": size}
    assert (tiles.tile_config(**asked).block_n, tiles.tile_config(**asked).late) == (128, True)
    assert tiles.tile_config(**asked | {"late": False}).block_n == 128


@pytest.mark.parametrize("change", WITH_FEWER_KEYS, ids=str)
def test_what_has_fewer_keys_in_an_iteration_is_not_late(change: dict[str, Any]) -> None:
    tile = tiles.tile_config(**WHOLE_BLOCKS | change)
    assert tile.block_n < 128 and not tile.late


def test_values_are_late_where_rows_see_many_keys() -> None:
    whole = {"window": 0, "chunk": 0, "prefix": 0}
    few = [{"window": 128}, {"chunk": 512}, {"prefix": 3}, {"window": 4096, "chunk": 64}]
    assert tiles.worth_late(**whole) and tiles.worth_late(**whole | {"window": 4096})
    assert not any(tiles.worth_late(**whole | each) for each in few)


def test_tall_tiles_are_large_enough_for_the_matrix_units() -> None:
    """64 rows for each group of four warps on Hopper, 128 on Blackwell; where these would spill, half of them."""
    sizes: dict[str, Any] = {"num_rows": 512, "num_requests": 8, "bytes_per_element": 2, "block_size": 64, "bulk": True}
    for group in (1, 3, 4, 7, 8, 16, 64):
        for size in (32, 80, 128, 192, 256):
            tile = tiles.tile_config(group=group, key_size=size, value_size=size, **sizes)
            rows = 64 if group in (3, 7) and size > 128 else 128
            assert tile.bulk and tile.block_m == rows and tile.num_warps == 8 and 64 % tile.block_n == 0


@compiling
@pytest.mark.parametrize(("size", "group", "given"), [(64, 8, {}), (128, 4, {}), (128, 1, {"WINDOW": 4096})], ids=str)
def test_values_are_multiplied_beside_the_next_weights_on_hopper(size, group, given, tmp_path):
    """The loop over clear iterations waits for nothing but the scores; what the product reads and writes by then is
    left alone."""
    compiled = compile_attention(HOPPER, "bf16", size, 512, group=group, split=True, **given)
    _, clear = ahead.innermost_loops(compiled)
    scores, wait, weighted, exponentials = (
        re.search(pattern, clear).start()
        for pattern in (
            r"warp_group_dot %q",
            "warp_group_dot_wait ",
            r"warp_group_dot %\w+, %v",
            r"math.exp2 .*tensor<128x128xf32",
        )
    )
    assert scores < wait < weighted < exponentials
    assert len(re.findall("warp_group_dot_wait ", clear)) == 1
    assert len(re.findall("async_tma_copy_global_to_local", clear)) == 2
    code = machine.instructions(compiled, tmp_path)
    assert len(machine.loops_of_products(code)) == 2 and machine.used_under_way(code) == []


@compiling
@pytest.mark.parametrize("size", (64, 128, 256))
@pytest.mark.parametrize("target", ahead.TARGETS[1:3], ids=str)
def test_asking_ahead_costs_no_registers(target, size, tmp_path):
    """Of low tiles, whose programs share a processor by how many registers they have; a thread is given eight at a
    time."""
    asking, silent = (compile_attention(target, "bf16", size, 8, split=True, AHEAD=each) for each in (8, 0))
    before, _, behind = asking.asm["ptx"].partition("griddepcontrol.wait")
    assert before.count("cp.async.bulk.prefetch") == 1 and "bulk.prefetch" not in behind + silent.asm["ptx"]
    asks, asks_not = (ahead.Usage.of(each, target, tmp_path) for each in (asking, silent))
    assert -(-asks.registers // 8) <= -(-asks_not.registers // 8)
    assert asks.shared == asks_not.shared and not asks.spilled
    ahead.assert_waits(asking)


def test_writes_of_what_products_still_use_are_seen():
    """Sums and rows until the wait, of each width; not what only reads rows."""
    code = ["HGMMA.64x64x16.F32.BF16 R88, R136, gdesc[UR8].tnspB, R88, gsb0", "FMUL R5, R138, R120"]
    code += ["MUFU.EX2 R119, R4", "@!P1 IMAD.WIDE R138, R2, R3, R4", "LDG.E R140, desc[UR4][R2.64]"]
    code += ["LDS.128 R84, [R2]", "LDS.128 R86, [R2]", "STG.E [R2], R87", machine.WAIT, "MUFU.EX2 R88, R4"]
    assert machine.used_under_way(code) == [code[2], code[3], code[6]]


@pytest.mark.parametrize(
    "wrong",
    (
        *("STG.E [R2], R90", "FADD R5, R6, R88", "CS2R R87, SRZ", "LDSM.16.M88.4 R133, [R2]"),
        *("ATOMG.E.ADD PT, R89, desc[UR4][R2.64], R5", "HGMMA.64x64x16.F32.BF16 R138, gdesc[UR8], RZ, !UPT"),
    ),
)
def test_other_uses_of_what_is_under_way_are_seen(wrong):
    """Reads of sums, pairs and fours of registers, and sums that are another product's rows."""
    product = "HGMMA.64x64x16.F32.BF16 R88, R136, gdesc[UR8].tnspB, R88, gsb0"
    assert machine.used_under_way([product, wrong]) == [wrong]


def test_what_is_under_way_from_one_iteration_to_the_next_is_seen():
    product = "HGMMA.64x64x16.F32.BF16 R88, R136, gdesc[UR8].tnspB, R88, gsb0"
    code = [".L_x_1:", "FMUL R136, R2, R3", machine.WAIT, "FMUL R137, R2, R3", product, "@P0 BRA `(.L_x_1)"]
    assert machine.used_under_way(code) == [code[1]]
