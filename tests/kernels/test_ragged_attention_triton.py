"""The Triton kernel: its numbers in Triton's interpreter, and compiled for four targets without a GPU."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.kernels.ragged_cases import (
    CASES,
    COMBINATIONS,
    SCALES,
    WITH_PREFIX,
    Case,
    exact_ragged,
    exact_varlen,
    make_inputs,
)

triton = pytest.importorskip("triton")
launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
attends = pytest.importorskip("selective_compile.kernels.ragged_attention_attend_triton")
writes = pytest.importorskip("selective_compile.kernels.ragged_attention_write_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
TARGETS, compile_ahead, assert_ships = ahead.TARGETS, ahead.compile_ahead, ahead.assert_ships
compiling = pytest.mark.skipif(
    not isinstance(attends.attention_kernel, triton.JITFunction),
    reason="TRITON_INTERPRET is set: kernels cannot be compiled",
)

# Several roundings of a weight and of the result, on values of order 1.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
HALF_PRECISION = ("mixed", "window_and_softcap", "wide_values", "head_size_80", "strided", "everything", "prefix")
RUNS = [(case, torch.float32) for case in (*CASES, *WITH_PREFIX)]
RUNS += [(case, dtype) for case in CASES if case.name in HALF_PRECISION for dtype in (torch.bfloat16, torch.float16)]


def count_features(case: Case) -> int:
    return sum(bool(value) for value in (case.window, case.softcap, case.chunk, case.sinks, case.slopes))


@pytest.fixture
def nan_filled_outputs(monkeypatch):
    """What a launcher allocates holds NaN, so that an element the kernel leaves out shows."""
    new_empty = torch.Tensor.new_empty

    def filled(self, *size, **options):
        tensor = new_empty(self, *size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_ragged_attention(case, dtype, nan_filled_outputs):
    inputs = make_inputs(case, dtype)
    expected, key_pool, value_pool = exact_ragged(inputs)
    output = launcher.ragged_attention(*inputs.ragged())
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    # Exactly: written slots are copies, all others (NaN among them) are as before.
    for pool, exact in ((inputs.key_pool, key_pool), (inputs.value_pool, value_pool)):
        torch.testing.assert_close(pool.double(), exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_varlen_attention(case, dtype, nan_filled_outputs):
    inputs = make_inputs(case, dtype)
    output = launcher.varlen_attention(*inputs.varlen())
    torch.testing.assert_close(output.double(), exact_varlen(inputs), rtol=0, atol=TOLERANCE[dtype])


# Every other one: an even number of features. Any four of the five features occur in every combination.
@pytest.mark.parametrize("case", [case for case in COMBINATIONS if count_features(case) % 2 == 0], ids=str)
def test_combinations_of_features(case, nan_filled_outputs):
    inputs = make_inputs(case, torch.float32)
    output = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(output.double(), exact_ragged(inputs)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_sinks_of_every_dtype(dtype):
    inputs = make_inputs(Case(name="", requests=((1, 40), (20, 5)), sinks=1.0), torch.float32)
    inputs = dataclasses.replace(inputs, sinks=inputs.sinks.to(dtype))
    output = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(output.double(), exact_ragged(inputs)[0], rtol=0, atol=2e-5)


def test_a_sink_without_weight_changes_nothing():
    inputs = make_inputs(Case(name="", requests=((1, 40), (20, 5)), window=9), torch.float32)
    with_sinks = dataclasses.replace(inputs, sinks=torch.full((4,), -torch.inf))
    expected = launcher.ragged_attention(*inputs.ragged())
    assert torch.equal(launcher.ragged_attention(*with_sinks.ragged()), expected)


def test_the_cases_cover_both_tiles_and_several_tiles_of_one_request():
    tall, rows_per_tile = set(), []
    for case in CASES:
        rows = sum(count for count, _ in case.requests) + case.padding_rows
        tile = config(rows, len(case.requests), case.query_heads // case.kv_heads, case.key_size, 4)
        tall.add(tile.block_m > 16)
        rows_per_tile += [count * case.query_heads // case.kv_heads / tile.block_m for count, _ in case.requests]
    assert tall == {True, False}
    assert max(rows_per_tile) > 2


def config(
    rows: int, requests: int, group: int, size: int, width: int, *, value_size=None, block_size: int = 16, **others
):
    return attends.tile_config(
        num_rows=rows,
        num_requests=requests,
        group=group,
        key_size=size,
        value_size=value_size or size,
        bytes_per_element=width,
        block_size=block_size,
        **{"bulk": False, **others},
    )


class Recorder:
    """Stands in for a kernel: what `launch(kernel, grid, args, options)` returns is appended to `seen`."""

    def __init__(self, launch):
        self.seen, self.launch = [], launch

    def __call__(self, kernel, tensor):
        self.kernel = kernel
        return self

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.append(self.launch(self.kernel, grid, args, options))


def test_the_grid_does_not_depend_on_lengths(monkeypatch):
    """The same T and N with other lengths give the same launches."""
    recorder = Recorder(lambda kernel, grid, args, options: grid)
    for module in (attends, writes):
        monkeypatch.setattr(module, "on_device", recorder)
    for requests in (((40, 0), (1, 3), (1, 90)), ((1, 0), (1, 3), (40, 9))):
        launcher.ragged_attention(*make_inputs(Case(name="", requests=requests), torch.float32).ragged())
    assert len(recorder.seen) == 4
    assert recorder.seen[:2] == recorder.seen[2:]


@compiling
def test_steps_of_every_shape_share_two_compiled_kernels(monkeypatch):
    """T, N, the width of the block table and the alignment of the metadata may not cause a recompile."""
    monkeypatch.setattr(triton.runtime.driver, "_active", ahead.NoDevice())
    recorder = Recorder(lambda kernel, grid, args, rest: (kernel, kernel.warmup(*args, grid=grid, **rest)))
    for module in (attends, writes):
        monkeypatch.setattr(module, "on_device", recorder)
    shapes = (((3, 5), (1, 20)), ((64, 0),), ((16, 0),) * 16)
    shapes += (((1, 0),) * 16, ((1, 0),), ((1, 97), (0, 0), (8, 300)))
    for requests in shapes:
        case = Case(name="", requests=requests, key_size=64, value_size=64, sinks=0.0, slopes=True)
        arguments = list(make_inputs(case, torch.bfloat16).ragged())
        launcher.ragged_attention(*arguments)
        for index in (5, 6, 7, 8, 13, 14):
            tensor = arguments[index]
            arguments[index] = torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
        launcher.ragged_attention(*arguments)
    compiled = {(kernel, variant.hash) for kernel, variant in recorder.seen}
    attention = [variant for kernel, variant in compiled if kernel is attends.attention_kernel]
    assert (len(attention), len(compiled)) == (2, 3)


TENSORS = ("output", "query", "keys", "values", "key", "value", "key_pool", "value_pool")
METADATA = {"cu_seqlens_q": "*i32", "context_lens": "*i32", "block_table": "*i32", "slot_mapping": "*i64"}
METADATA |= {
    "sinks": "*bf16",
    "slopes": "*fp32",
    "distance_bias": "*bf16",
    "key_scales": "*fp32",
    "value_scales": "*fp32",
}
PARTS = ("pieces", "sums", "maxima", "totals")


def types(element: str) -> dict[str, str]:
    return METADATA | dict.fromkeys(PARTS, "*fp32") | {"pieces": "*i32"} | dict.fromkeys(TENSORS, "*" + element)


def compile_attention(
    target,
    element: str,
    size: int,
    rows: int,
    *,
    given=(),
    split=False,
    group=4,
    value_size=None,
    fp8=False,
    row_sinks=False,
    **changes,
):
    """The kernel as the launcher would ask for it: 8 requests, 8 key/value heads with a group of query heads each.

    given: which of sinks, slopes and biases by distance there are; split: whether keys are split; value_size: where it
    is not that of keys; fp8: whether the pools are that; row_sinks: whether rows have sinks of their own.
    """
    block_size = changes.get("BLOCK_SIZE", 128)  # the engine's own
    width, bulk = 4 if element == "fp32" else 2, target.arch in (90, 100)
    value_size = value_size or size
    late = attends.worth_late(**{name.lower(): changes.get(name, 0) for name in ("WINDOW", "CHUNK", "PREFIX")})
    others = {
        "bulk": bulk,
        "late": late,
        "slopes": "slopes" in given,
        "distances": "distance_bias" in given,
        "narrow": fp8,
        "most": target.arch == 90 and not (changes.get("SOFTCAP") or changes.get("CHUNK")),
        "backend": target.backend,
    }
    tile = config(rows, 8, group, size, width, value_size=value_size, block_size=block_size, **others)
    constants = {"SCALE": 0.1, "WINDOW": 0, "SOFTCAP": 0.0, "CHUNK": 0, "PREFIX": 0}
    constants |= {"GROUP": tile.heads, "HEADS": 8 * group, "PARTS": group // tile.heads}
    constants |= {name: None for name in ("sinks", "slopes", "distance_bias") if name not in given}
    constants |= {"DISTANCES": 512 if "distance_bias" in given else 0, "ONE_BIAS": False}
    constants |= {"ROW_SINKS": row_sinks}
    constants |= {"KEY_SIZE": size, "VALUE_SIZE": value_size, "BLOCK_D": tile.block_d, "BLOCK_DV": tile.block_dv}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "WIDEN": False, "SPLIT": split}
    constants |= {"BLOCK_SIZE": block_size, "LATE": tile.late, "AHEAD": tile.ahead, "LANES": 32 * tile.num_warps}
    constants |= {} if split else dict.fromkeys(PARTS)
    constants |= {} if tile.bulk else {"key_tiles": None, "value_tiles": None}
    constants |= {} if fp8 else dict.fromkeys(SCALES)
    stored = "fp8e4nv" if fp8 else element
    kinds = types(element) | dict.fromkeys(("keys", "values"), "*" + stored)
    for name, padded in (("key_tiles", tile.block_d), ("value_tiles", tile.block_dv)):
        kinds[name] = f"tensordesc<{stored}[1, 1, {tile.block_n}, {padded}]>"
    options = tile.options(target.backend)
    return compile_ahead(attends.attention_kernel, target, kinds, constants | changes, **options)


@pytest.fixture(autouse=True)
def triton_cache(tmp_path_factory, monkeypatch):
    """Of the test alone: whatever is compiled is compiled by it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("rows", [8, 512], ids=["decode", "prefill"])
@pytest.mark.parametrize(("element", "size"), [("bf16", 64), ("bf16", 128), ("fp32", 128)])
@compiling
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_attention_compiles_ahead_of_time_without_spills(target, element, size, rows, tmp_path):
    assert_ships(compile_attention(target, element, size, rows), tmp_path)


COMPARED = re.compile(r"arith\.cmpi .* : tensor<")


@compiling
@pytest.mark.parametrize("block_size", (16, 64))
@pytest.mark.parametrize("target", [TARGETS[1], TARGETS[3]], ids=str)
def test_keys_that_every_row_sees_are_compared_with_nothing(target, block_size):
    """The loop over the others comes first; it has the comparisons of both ends of a window."""
    compiled = compile_attention(target, "bf16", 64, 512, WINDOW=300, BLOCK_SIZE=block_size)
    masked, clear = ahead.innermost_loops(compiled)
    assert len(COMPARED.findall(masked)) >= 4
    assert not COMPARED.search(clear)
    assert len(re.findall(r"warp_group_dot |tt\.dot ", clear)) == 2
    if target.arch == 90 and block_size == 64:
        # Keys and values go from the pool into shared memory in a copy each, and from there into the matrix units.
        assert len(re.findall("async_tma_copy_global_to_local", clear)) == 2
        assert not re.findall(r"ttg\.local_(load|store|alloc).*x64x", clear)
        assert "m64n64k16" in compiled.asm["ptx"]
    elif target.arch == 90:
        assert len(re.findall("async_copy_global_to_local", clear)) == 2


@compiling
@pytest.mark.parametrize("target", [TARGETS[1], TARGETS[3]], ids=str)
def test_most_keys_of_a_prefix_are_compared_with_nothing_either(target):
    compiled = compile_attention(target, "bf16", 64, 512, PREFIX=300)
    masked, clear = ahead.innermost_loops(compiled)
    assert COMPARED.search(masked) and not COMPARED.search(clear)


# As in llama4, gpt_oss, bloom and mpt, and all at once: names of tensors given, changed constants, rows.
EVERYTHING = {"CHUNK": 8192, "WINDOW": 128, "SOFTCAP": 30.0}
FEATURES = {
    "chunk": ((), {"CHUNK": 8192}, 512),
    "sinks_and_window": (("sinks",), {"WINDOW": 128}, 512),
    "slopes": (("slopes",), {}, 512),
    "distances_decode": (("distance_bias",), {}, 8),
    "distances": (("distance_bias",), {}, 512),
    "distances_and_everything": (("sinks", "slopes", "distance_bias"), EVERYTHING, 512),
    "everything_with_a_prefix": (("sinks", "slopes"), {"PREFIX": 300, "SOFTCAP": 30.0}, 512),
    "everything_decode": (("sinks", "slopes"), EVERYTHING, 8),
    "everything": (("sinks", "slopes"), EVERYTHING, 512),
    "everything_late": (("sinks", "slopes"), EVERYTHING | {"WINDOW": 4096}, 512),  # on Hopper
}


# One feature alone for those targets that spilled before others.
COMPILED = [(target, name) for name in FEATURES for target in (TARGETS if "every" in name else TARGETS[::2])]


@compiling
@pytest.mark.parametrize(("target", "feature"), COMPILED, ids=str)
def test_features_compile_ahead_of_time(target, feature, tmp_path):
    given, constants, rows = FEATURES[feature]
    assert_ships(compile_attention(target, "bf16", 128, rows, given=given, **constants), tmp_path)


# Head sizes from 32 to 576, groups of more heads than a low tile has rows for, and more features, each for some of the
# targets: the element, head size and rows, what else is given, and the targets, the first for a turn of its own.
SIZES = {
    "80_window_and_softcap": ("fp16", 80, 512, {"WINDOW": 100, "SOFTCAP": 50.0}, (0, 1, 2, 3)),
    "64_chunk_shorter_than_a_tile": ("bf16", 64, 512, {"CHUNK": 8}, (1, 2, 3, 0)),
    "features_float32": ("fp32", 128, 512, {"given": ("sinks", "slopes"), "CHUNK": 64, "WINDOW": 40}, (2, 3, 0, 1)),
    "without_a_pool": ("bf16", 128, 512, {"BLOCK_SIZE": 0}, (3, 0, 1, 2)),
    "32": ("bf16", 32, 512, {"BLOCK_SIZE": 16}, (1, 3)),
    "80": ("bf16", 80, 8, {"BLOCK_SIZE": 16}, (1, 3)),
    "96": ("bf16", 96, 512, {"BLOCK_SIZE": 16, "split": True}, (0, 2)),
    "192_and_128": ("bf16", 192, 512, {"value_size": 128, "split": True}, (0, 1, 2, 3)),
    "256": ("bf16", 256, 512, {"split": True}, (0, 1, 2, 3)),
    "256_everything": ("bf16", 256, 512, {"given": ("sinks", "slopes"), "split": True, **EVERYTHING}, (0, 2, 3)),
    "256_small_blocks": ("bf16", 256, 512, {"BLOCK_SIZE": 16, "split": True}, (1, 2)),
    "256_decode": ("bf16", 256, 8, {"split": True}, (0, 3)),
    "256_float32": ("fp32", 256, 512, {"split": True}, (1, 3)),
    "512": ("bf16", 512, 512, {"split": True}, (0, 2)),
    "512_float32": ("fp32", 512, 512, {"split": True}, (1, 3)),
    "576_and_512": ("bf16", 576, 512, {"value_size": 512, "split": True}, (1, 3)),
    "576_and_512_float32": ("fp32", 576, 512, {"value_size": 512, "split": True}, (0, 1, 2, 3)),
    "576": ("bf16", 576, 512, {"split": True}, (0, 3)),
    "576_fp8": ("bf16", 576, 512, {"split": True, "fp8": True, "group": 8}, (1, 2)),
    "576_fp8_everything": (
        *("bf16", 576, 512, {"split": True, "fp8": True, "group": 8, "given": ("sinks", "slopes"), **EVERYTHING}),
        (1, 2, 3),
    ),
    "576_float32": ("fp32", 576, 512, {"split": True}, (0, 1, 2, 3)),
    "576_everything_float32": ("fp32", 576, 512, {"given": ("sinks", "slopes"), "split": True, **EVERYTHING}, (0, 3)),
    "576_and_512_decode": ("bf16", 576, 8, {"value_size": 512, "group": 16, "split": True}, (0, 3)),
    "576_and_512_group_of_128": ("bf16", 576, 8, {"value_size": 512, "group": 128, "split": True}, (0, 1, 2, 3)),
    "320_group_of_71": ("fp16", 320, 512, {"group": 71, "split": True}, (1, 3)),
    "512_group_of_64_float32": ("fp32", 512, 512, {"group": 64, "split": True}, (0, 2)),
    "group_of_32": ("bf16", 128, 8, {"group": 32, "split": True}, (0, 1)),
    "group_of_71": ("bf16", 64, 8, {"group": 71, "split": True}, (2, 3)),
    "group_of_32_float32": ("fp32", 128, 8, {"group": 32, "split": True}, (2,)),
    # Groups that are no power of two, and head sizes that are not: what is told of them takes registers.
    "group_of_7_float32": ("fp32", 128, 512, {"group": 7, "split": True}, (1, 2)),
    "80_group_of_1_float32": ("fp32", 80, 512, {"group": 1, "split": True}, (1, 2)),
    "96_group_of_7_float32": ("fp32", 96, 512, {"group": 7, "WINDOW": 128}, (0,)),
    "group_of_3_everything_float32": ("fp32", 128, 512, {"group": 3, "given": ("sinks", "slopes"), **EVERYTHING}, (2,)),
    "192_group_of_3_decode_float32": ("fp32", 192, 8, {"group": 3, "given": ("sinks", "slopes"), **EVERYTHING}, (2,)),
    "192_group_of_7_slopes_float32": ("fp32", 192, 512, {"group": 7, "given": ("slopes",), "split": True}, (1,)),
    "33_group_of_64_float32": ("fp32", 33, 512, {"group": 64, "WINDOW": 4096, "SOFTCAP": 50.0, "split": True}, (2,)),
    "256_group_of_7_slopes": ("bf16", 256, 512, {"group": 7, "given": ("slopes",), "split": True}, (1, 2)),
    "64_distances": ("bf16", 64, 512, {"given": ("distance_bias",), "split": True}, (0, 1, 2, 3)),
    "128_distances_float32": ("fp32", 128, 512, {"given": ("distance_bias",), "split": True}, (0, 1, 2, 3)),
    "256_distances": ("bf16", 256, 512, {"given": ("distance_bias",), "split": True, "WINDOW": 512}, (0, 1, 2, 3)),
    "row_sinks": ("bf16", 128, 512, {"given": ("sinks", "distance_bias"), "row_sinks": True}, (0, 1, 2, 3)),
    "192_group_of_7_distances": ("fp16", 192, 512, {"group": 7, "given": ("distance_bias",), "split": True}, (0, 2)),
    "192_group_of_5": ("fp16", 192, 512, {"group": 5, "given": ("sinks",), "WINDOW": 128}, (2,)),
    "160_group_of_16_slopes": ("fp16", 160, 512, {"group": 16, "given": ("slopes",), "split": True}, (2,)),
}
SIZED = [(TARGETS[place], name) for name, variant in SIZES.items() for place in variant[-1]]


@compiling
@pytest.mark.parametrize(("target", "name"), SIZED, ids=str)
def test_sizes_compile_ahead_of_time_without_spills(target, name, tmp_path):
    element, size, rows, given, _ = SIZES[name]
    assert_ships(compile_attention(target, element, size, rows, **given), tmp_path)


@compiling
@pytest.mark.parametrize("element,heads,key_size", [("bf16", 8, 128), ("fp32", 128, 192)])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_write_compiles_ahead_of_time(target, element, heads, key_size, tmp_path):
    constants = dict.fromkeys(SCALES) | {"KV_HEADS": heads, "KEY_SIZE": key_size, "VALUE_SIZE": 128, "BLOCK_SIZE": 16}
    block_d = triton.next_power_of_2(key_size)
    constants |= {"BLOCK_K": writes.heads_of_a_part(heads, block_d), "BLOCK_D": block_d, "BLOCK_DV": 128}
    compiled = compile_ahead(writes._write_kernel, target, types(element), constants, num_warps=4)
    assert_ships(compiled, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_attention_on_a_gpu(case, dtype, nan_filled_outputs):
    inputs = make_inputs(case, dtype)
    expected, key_pool, value_pool = exact_ragged(inputs)
    on_gpu = [argument.cuda() if isinstance(argument, torch.Tensor) else argument for argument in inputs.ragged()]
    output = launcher.ragged_attention(*on_gpu)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=0, atol=TOLERANCE[dtype])
    for pool, exact in ((on_gpu[3], key_pool), (on_gpu[4], value_pool)):
        torch.testing.assert_close(pool.cpu().double(), exact, rtol=0, atol=0, equal_nan=True)
