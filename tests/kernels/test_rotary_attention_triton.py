"""Rotary attention by the Triton kernels: in Triton's interpreter, and compiled for four targets without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selective_compile import reference
from tests.kernels.ragged_cases import CHUNK, DECODE, MIXED, Case, Inputs, make_inputs
from tests.kernels.rotary_cases import TURNS, Turn, rotary, widened

triton = pytest.importorskip("triton")
launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
writes = pytest.importorskip("selective_compile.kernels.rotary_attention_write_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# A number of a pool is rounded once; in bfloat16 the interpreter cuts bits off instead.
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-11}
STEPS = (
    Case(name="mixed", requests=MIXED, padding_rows=3),
    Case(name="odd_heads", requests=CHUNK, query_heads=5, kv_heads=1, key_size=24, value_size=40, block_size=5),
    Case(name="strided", requests=DECODE, query_heads=14, kv_heads=2, strided=True, padding_rows=2),
    Case(name="options", requests=MIXED, window=17, softcap=3.0, sinks=0.0, slopes=True),
    Case(name="prefix", requests=MIXED, prefix=19, sinks=0.0),
    Case(name="only_padding", requests=((0, 0), (0, 9)), padding_rows=2),
    Case(name="nothing", requests=()),
    Case(name="one_row", requests=((1, 4),)),
)
FEW = Case(name="few_rows", requests=((3, 2), (1, 9), (0, 0)), padding_rows=1)
RUNS = [(FEW, turn, torch.float32) for turn in TURNS]
RUNS += [(step, TURNS[9], torch.float32) for step in STEPS]
RUNS += [(STEPS[2], turn, dtype) for turn in (TURNS[4], TURNS[7]) for dtype in (torch.bfloat16, torch.float16)]
# More query heads than a program takes, and a head that is padded.
RUNS += [
    (Case(name="many_heads", requests=DECODE[:2], query_heads=24, kv_heads=12, key_size=80), TURNS[7], torch.float32)
]


@pytest.fixture
def nan_filled_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher allocates holds NaN, so that an element the kernel leaves out shows."""
    new_empty = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        tensor = new_empty(self, *size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize(("case", "turn", "dtype"), RUNS, ids=str)
def test_rotary_attention(case: Case, turn: Turn, dtype: torch.dtype, nan_filled_outputs: None) -> None:
    inputs = make_inputs(case, dtype)
    arguments = rotary(inputs, turn)
    exact = widened(arguments)
    expected = reference.rotary_attention(*exact)
    before = inputs.key_pool.clone(), inputs.value_pool.clone()
    output = launcher.rotary_attention(*arguments)
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(inputs.key_pool.double(), exact[12], rtol=ROUNDED[dtype], atol=1e-5, equal_nan=True)
    torch.testing.assert_close(inputs.value_pool.double(), exact[13], rtol=0, atol=0, equal_nan=True)
    assert_written_alone(inputs, before)


def assert_written_alone(inputs: Inputs, before: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Slots that no row names hold what they did, NaN among them, to the bit."""
    slots = inputs.slot_mapping[inputs.slot_mapping >= 0]
    for pool, was in zip((inputs.key_pool, inputs.value_pool), before, strict=True):
        others = torch.ones(pool.shape[0], pool.shape[2], dtype=torch.bool)
        others[slots // pool.shape[2], slots % pool.shape[2]] = False
        after, was = (each.transpose(1, 2)[others] for each in (pool, was))
        torch.testing.assert_close(after, was, rtol=0, atol=0, equal_nan=True)


def test_the_queries_are_the_references(nan_filled_outputs: None) -> None:
    """By themselves, of slices of one tensor, as a projection gives them that is all three."""
    merged = torch.randn(7, 4 + 2 + 2, 24)
    query, key, value = merged.split([4, 2, 2], dim=1)
    pools = tuple(torch.full((3, 2, 4, 24), torch.nan) for _ in "kv")
    slots = torch.tensor([5, -1, 0, 11, 7, -1, 2])
    tables, weights = tuple(torch.randn(2, 7, 10).unbind()), tuple(torch.randn(2, 24).unbind())
    rotation = (1e-6, 0.5, 14, 10, True)
    found = writes.rotate_and_write(query, key, value, tables, weights, rotation, pools, (None, None), slots)
    queries, keys = reference.rotated_heads(query, key, *tables, *weights, *rotation)
    torch.testing.assert_close(found, queries)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(pools[0][slot // 4, :, slot % 4], keys[row])
            assert torch.equal(pools[1][slot // 4, :, slot % 4], value[row])
    assert all(int(pool.isnan().sum()) == (12 - 5) * 2 * 24 for pool in pools)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_elements_that_are_not_rotated_may_be_infinite() -> None:
    query = torch.randn(2, 4, 16)
    query[0, 1, 12] = torch.inf
    pools, tables = tuple(torch.zeros(1, 4, 4, 16) for _ in "kv"), tuple(torch.randn(2, 2, 8).unbind())
    rotation = (None, 0.0, 0, 8, False)
    found = writes.rotate_and_write(
        query, query, query, tables, (None, None), rotation, pools, (None, None), torch.tensor([0, 1])
    )
    torch.testing.assert_close(found, reference.rotated_heads(query, query, *tables, None, None, *rotation)[0])
    assert not found.isnan().any()


def test_a_row_is_the_same_bits_whatever_rows_are_with_it() -> None:
    inputs = make_inputs(Case(name="", requests=((9, 4),)), torch.float32)
    arguments = rotary(inputs, TURNS[7])

    def rotated(rows: slice) -> torch.Tensor:
        pools = tuple(torch.zeros(9, 2, 16, 16) for _ in "kv")
        query, key, value, *tables = (tensor[rows] for tensor in arguments[:5])
        slots = inputs.slot_mapping[rows]
        return writes.rotate_and_write(
            query, key, value, tables, arguments[5:7], arguments[7:12], pools, (None, None), slots
        )

    every = rotated(slice(None))
    assert all(torch.equal(rotated(slice(row, row + 1))[0], every[row]) for row in range(9))


POINTERS = ("output", "query", "key", "value", "cos", "sin", "query_weight", "key_weight", "key_pool", "value_pool")


@pytest.mark.skipif(not isinstance(writes._rotate_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set")
@pytest.mark.parametrize(
    ("element", "size", "norm", "fp8"),
    (
        ("bf16", 128, False, False),
        ("bf16", 128, True, False),
        ("fp32", 128, True, False),
        ("fp16", 80, False, False),
        ("bf16", 256, True, False),
        ("bf16", 128, True, True),
    ),
    ids=str,
)
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_it_ships(target: Any, element: str, size: int, norm: bool, fp8: bool, tmp_path: Any) -> None:
    """With 32 query heads to 8 of keys, as the launcher would ask for it; interleaved with the norm, else by halves."""
    if fp8 and target == ahead.TARGETS[0]:
        pytest.skip("no numbers of e4m3 below compute capability 8.9")
    block_d = triton.next_power_of_2(size)
    constants = {"EPS": 1e-6 if norm else None, "WEIGHT_OFFSET": 0.0, "FIRST": 0, "ROTATED": size}
    constants |= {"INTERLEAVED": norm, "WIDE": not norm, "HEADS": 32, "KV_HEADS": 8, "BLOCK_SIZE": 16}
    constants |= {"KEY_SIZE": size, "VALUE_SIZE": size, "BLOCK_D": block_d, "BLOCK_DV": block_d}
    constants |= {"BLOCK_H": writes.heads_of_a_part(32, block_d)}
    constants |= {} if norm else {"query_weight": None, "key_weight": None}
    scales = dict.fromkeys(("key_scales", "value_scales"))
    types = dict.fromkeys(POINTERS, f"*{element}") | {"slot_mapping": "*i64"}
    if fp8:
        types |= dict.fromkeys(("key_pool", "value_pool"), "*fp8e4nv") | dict.fromkeys(scales, "*fp32")
    else:
        constants |= scales
    compiled = ahead.compile_ahead(writes._rotate_kernel, target, types, constants, num_warps=4)
    ahead.assert_ships(compiled, tmp_path)


class Warmed:
    """Stands in for a kernel: compiles it for what it is launched with, and launches nothing."""

    def __init__(self, found: set[str]) -> None:
        self.found = found

    def __call__(self, kernel: Any, tensor: torch.Tensor) -> Any:
        self.kernel = kernel
        return self

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.found.add(self.kernel.warmup(*args, grid=grid, **options).hash)


@pytest.mark.skipif(not isinstance(writes._rotate_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set")
def test_steps_of_every_shape_share_one_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", ahead.NoDevice())
    found: set[str] = set()
    monkeypatch.setattr(writes, "on_device", Warmed(found))
    pools = tuple(torch.zeros(9, 2, 16, 64, dtype=torch.bfloat16) for _ in "kv")
    for rows in (1, 7, 16):
        query, key, value = torch.zeros(rows, 8, 64, dtype=torch.bfloat16).split([4, 2, 2], dim=1)
        tables, slots = tuple(torch.zeros(2, rows, 64).unbind()), torch.zeros(rows + 1, dtype=torch.int64)
        for chosen in (slots[:-1], slots[1:]):
            rotation = (None, 0.0, 0, 64, False)
            writes.rotate_and_write(query, key, value, tables, (None, None), rotation, pools, (None, None), chosen)
    assert len(found) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("case", "turn"), [(case, turn) for case, turn, dtype in RUNS if dtype is torch.float32], ids=str
)
def test_rotary_attention_on_a_gpu(case: Case, turn: Turn, dtype: torch.dtype, nan_filled_outputs: None) -> None:
    arguments = rotary(make_inputs(case, dtype), turn)
    exact = widened(arguments)
    expected = reference.rotary_attention(*exact)
    on_gpu = [argument.cuda() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    output = launcher.rotary_attention(*on_gpu)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=0, atol=TOLERANCE[dtype])
    for pool, wanted in ((on_gpu[12], exact[12]), (on_gpu[13], exact[13])):
        torch.testing.assert_close(pool.cpu().double(), wanted, rtol=ROUNDED[dtype], atol=1e-5, equal_nan=True)
