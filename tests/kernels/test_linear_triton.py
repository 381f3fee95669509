"""The Triton linear kernel: rows that do not depend on the others, in the interpreter; compiled for four targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selective_compile import ops
from selective_compile.implementations import forced_implementation
from tests.kernels.linear_cases import assert_near_float64, inputs

triton = pytest.importorskip("triton")
even_dots = pytest.importorskip("tests.kernels.even_dots").even_dots
launcher = pytest.importorskip("selective_compile.kernels.linear_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
compiling = pytest.mark.skipif(
    not isinstance(launcher._linear_kernel, triton.JITFunction),
    reason="TRITON_INTERPRET is set: kernels cannot be compiled",
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELEMENTS = {"fp32": 4, "bf16": 2, "fp16": 2}
# The interpreter cuts bfloat16 off where a GPU rounds it.
CUT_OFF = 2
# (N, K): one; under every tile; odd; over several tiles both ways.
SIZES = ((1, 1), (5, 3), (13, 17), (97, 129), (70, 260))


@pytest.fixture
def nan_filled_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher allocates holds NaN, so that an element the kernel leaves out shows."""
    new_empty = torch.Tensor.new_empty

    def filled(self: Tensor, *size: Any, **options: Any) -> Tensor:
        return new_empty(self, *size, **options).fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 33, 70])
def test_odd_sizes(rows: int, dtype: torch.dtype, nan_filled_outputs: None) -> None:
    for columns, depth in SIZES:
        x, weight, bias = inputs(rows, columns, depth, dtype)
        assert_near_float64(launcher.linear(x, weight), x, weight, roundings=CUT_OFF)
        assert_near_float64(launcher.linear(x, weight, bias), x, weight, bias, roundings=CUT_OFF)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 80), st.integers(1, 150)),
    dtype=st.sampled_from(DTYPES),
    others=st.lists(st.sampled_from((0.0, 1.0, 1e3, torch.inf, torch.nan)), max_size=150),
    data=st.data(),
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_has_the_same_bits_among_any_others(
    sizes: tuple[int, int], dtype: torch.dtype, others: list[float], data: st.DataObject
) -> None:
    """However many they are, wherever it stands among them, and whatever they hold."""
    x, weight, bias = inputs(1 + len(others), *sizes, dtype)
    place = data.draw(st.integers(0, len(others)), label="place")
    alone = launcher.linear(x[place : place + 1].clone(), weight, bias)
    scale = torch.tensor([*others[:place], 1.0, *others[place:]])[:, None]
    among = launcher.linear((x.float() * scale).to(dtype), weight, bias)
    assert torch.equal(among[place], alone[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_split_into_steps_gives_the_same_bits(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(150, 40, 70, dtype)
    every = launcher.linear(x, weight, bias)
    for size in (7, 32, 64, 149):
        assert torch.equal(torch.cat([launcher.linear(part, weight, bias) for part in x.split(size)]), every)


def test_a_library_does_not_do_so() -> None:
    """Else there would be no need for the kernel, and the tests above might hold for anything."""
    x, weight, _ = inputs(150, 90, 2000, torch.float32)
    every = F.linear(x, weight)
    parts = [torch.cat([F.linear(part, weight) for part in x.split(size)]) for size in (1, 2, 3, 7)]
    assert any(not torch.equal(part, every) for part in parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype: torch.dtype, nan_filled_outputs: None) -> None:
    x, weight, bias = inputs(35, 21, 40, dtype)
    wide = torch.full((35, 80), torch.nan, dtype=dtype)
    wide[:, ::2] = x
    bias_of_two = torch.stack([bias, bias * torch.nan], 1)
    expected = launcher.linear(x, weight, bias)
    for same_x in (x.t().contiguous().t(), wide[:, ::2]):
        assert torch.equal(launcher.linear(same_x, weight, bias_of_two[:, 0]), expected)
    assert torch.equal(launcher.linear(x, weight.t().contiguous().t(), bias), expected)
    assert torch.equal(launcher.linear(x, weight[4:20], bias[4:20]), expected[:, 4:20])


@pytest.mark.parametrize("shape", [(), (7,), (2, 9), (2, 3, 5), (2, 0, 5)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, weight, bias = inputs(shape, 21, 40, torch.bfloat16)
    result = launcher.linear(x, weight, bias)
    assert result.shape == (*shape, 21)
    if result.numel():
        assert_near_float64(result, x, weight, bias, roundings=CUT_OFF)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_nothing_to_compute(shape: tuple[int, int]) -> None:
    for rows in (0, 4):
        x, weight, bias = inputs(rows, *shape, torch.float32)
        assert torch.equal(launcher.linear(x, weight, bias), F.linear(x, weight, bias))


def test_what_does_not_fit_is_refused() -> None:
    x, weight, bias = inputs(3, 5, 7, torch.float32)
    with pytest.raises(ValueError, match=r"weight must be \[N, 6\] of torch.float32, got \[5, 7\]"):
        launcher.linear(x[:, :6], weight)
    with pytest.raises(ValueError, match=r"bias must be \[5\]"):
        launcher.linear(x, weight, bias[:4])
    with pytest.raises(ValueError, match=r"x must be of torch.float32, .*got torch.float64"):
        launcher.linear(x.double(), weight.double())


def test_the_op_runs_it() -> None:
    x, weight, bias = inputs(20, 50, 300, torch.float32)
    with forced_implementation("triton"):
        found = ops.linear(x, weight, bias)
    assert torch.equal(found, launcher.linear(x, weight, bias))


# ------------------------------------------------------------------------------------------------ compiled


@pytest.fixture
def triton_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test alone: whatever is compiled is compiled by it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


class Recorder:
    """Stands in for the kernel on its device: `seen` are the hashes of what a launch would compile, and the grids."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[int, int]]] = []

    def __call__(self, kernel: Any, tensor: Tensor) -> Recorder:
        self.kernel = kernel
        return self

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.seen.append((self.kernel.warmup(*args, grid=grid, **options).hash, grid))

        return launch


@compiling
def test_any_number_of_rows_runs_one_compiled_kernel(triton_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the middle of a tensor, at an address that is no multiple of 16, among them."""
    monkeypatch.setattr(triton.runtime.driver, "_active", ahead.NoDevice())
    recorder = Recorder()
    monkeypatch.setattr(launcher, "on_device", recorder)
    x, weight, bias = inputs(400, 130, 97, torch.bfloat16)
    for rows in (1, 2, 15, 16, 17, 64, 65, 400):
        launcher.linear(x[:rows], weight, bias)
        launcher.linear(x[400 - rows :], weight, bias)
    assert len({variant for variant, _ in recorder.seen}) == 1
    assert {grid[1] for _, grid in recorder.seen} == {3} and len({grid[0] for _, grid in recorder.seen}) > 2


@compiling
@pytest.mark.parametrize(("sizes", "has_bias"), [((4096, 14336), False), ((50257, 770), True)], ids=str)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_it_ships(
    target: Any, element: str, sizes: tuple[int, int], has_bias: bool, triton_cache: None, tmp_path: Any
) -> None:
    tile = launcher.tile_of(columns=sizes[0], depth=sizes[1], bytes_per_element=ELEMENTS[element])
    constants: dict[str, Any] = {"COLUMNS": sizes[0], "DEPTH": sizes[1], "WIDEN": False, "weight_column_stride": 1}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    constants |= {} if has_bias else {"bias": None}
    types = dict.fromkeys(("output", "x", "weight", "bias"), f"*{element}")
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = ahead.compile_ahead(launcher._linear_kernel, target, types, constants, **options)
    ahead.assert_ships(compiled, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_on_a_gpu(dtype: torch.dtype) -> None:
    for columns, depth in (*SIZES, (1000, 4096)):
        x, weight, bias = inputs(300, columns, depth, dtype)
        given = x.cuda(), weight.cuda(), bias.cuda()
        every = launcher.linear(*given)
        assert_near_float64(every.cpu(), x, weight, bias)
        for size in (1, 7, 64, 299):
            parts = [launcher.linear(part, *given[1:]) for part in given[0].split(size)]
            assert torch.equal(torch.cat(parts), every)
