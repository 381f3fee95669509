"""Attention to latents: every implementation against the exact result."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile import latent_ops, reference
from selective_compile.implementations import forced_implementation
from selective_compile.kernels import ragged_attention_cpu
from tests.kernels.ragged_cases import CHUNK, DECODE, MIXED, PREFILL, Case, Inputs, make_inputs

triton = pytest.importorskip("triton")
latents = pytest.importorskip("selective_compile.kernels.latent_attention_triton")
attends = pytest.importorskip("selective_compile.kernels.ragged_attention_attend_triton")
cuts = pytest.importorskip("selective_compile.kernels.ragged_attention_cut_triton")
tiles = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def case(name: str, requests: tuple[tuple[int, int], ...], heads: int, size: int, **options: Any) -> Case:
    """With keys alone; how many numbers of them are values is in `VALUES`."""
    return Case(name=name, requests=requests, query_heads=heads, kv_heads=1, key_size=size, value_size=size, **options)


CASES = (
    case("decode", DECODE, 4, 20),
    case("prefill", PREFILL, 6, 40, padding_rows=2),
    case("mixed", MIXED, 20, 40, padding_rows=3, block_size=8),
    case("as_large_as_deepseek", ((1, 130), (3, 20), (0, 5)), 40, 576, scale=0.05),
    case("many_heads", ((1, 70), (2, 33)), 71, 72, block_size=5, scale=0.1),
    case("window", ((1, 130), (7, 90), (2, 0)), 16, 40, window=33),
    case("sinks", MIXED, 5, 24, sinks=0.5, padding_rows=1),
    case("softcap_and_slopes", CHUNK, 24, 24, softcap=2.0, slopes=True),
    case("chunks", MIXED, 4, 24, chunk=24, window=17),
    case("prefix", MIXED, 4, 24, prefix=35, sinks=0.5),
    case("no_request", (), 4, 24, padding_rows=2),
)
VALUES = {20: 16, 24: 16, 40: 32, 56: 48, 72: 64, 576: 512}
LONG = (case("long_decode", ((1, 2100), (1, 700)), 3, 24), case("long", ((1, 2500), (9, 2000)), 16, 40))
HALF = ("sinks", "as_large_as_deepseek")


def arguments(inputs: Inputs, value_size: int | None = None, selection: Tensor | None = None) -> tuple[Any, ...]:
    metadata = (inputs.cu_seqlens_q, inputs.context_lens, inputs.block_table, inputs.slot_mapping)
    score = (inputs.scale, inputs.window, inputs.softcap, inputs.chunk, inputs.sinks, inputs.slopes)
    size = VALUES[inputs.key.shape[2]] if value_size is None else value_size
    return (
        inputs.query,
        inputs.key,
        inputs.key_pool,
        *metadata,
        size,
        *score,
        selection,
        inputs.key_scales,
        inputs.prefix,
    )


def check(implementation: str, inputs: Inputs, selection: Tensor | None = None) -> None:
    """Results, and that written rows are copies and all others as before."""
    wide = inputs.to(torch.float64)
    expected = reference.latent_attention(*arguments(wide, selection=selection))
    own = dataclasses.replace(inputs, key_pool=inputs.key_pool.clone())
    with forced_implementation(implementation):  # type: ignore[arg-type]
        output = latent_ops.latent_attention(*arguments(own, selection=selection))
    assert (output.dtype, output.shape) == (inputs.query.dtype, expected.shape)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[output.dtype])
    torch.testing.assert_close(own.key_pool.double(), wide.key_pool.double(), rtol=0, atol=0, equal_nan=True)


def runs(*cases: Case) -> list[Any]:
    dtypes = [(each, torch.float32) for each in cases]
    return dtypes + [(each, dtype) for each in cases if each.name in HALF for dtype in (torch.bfloat16, torch.float16)]


@pytest.fixture(autouse=True)
def nan_filled_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher allocates holds NaN, so that an element the kernel leaves out shows."""
    new_empty = torch.Tensor.new_empty

    def filled(self: Tensor, *size: Any, **options: Any) -> Tensor:
        tensor = new_empty(self, *size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


@pytest.mark.parametrize("each", CASES[:3], ids=str)
def test_the_reference_is_attention_to_values_of_their_own(each: Case) -> None:
    inputs = make_inputs(each, torch.float64)
    size = VALUES[each.key_size]
    apart = dataclasses.replace(
        inputs,
        value=inputs.key[..., :size].clone(),
        key_pool=inputs.key_pool.clone(),
        value_pool=inputs.key_pool[..., :size].clone(),
    )
    expected = reference.ragged_attention(*apart.ragged())
    torch.testing.assert_close(reference.latent_attention(*arguments(inputs)), expected, rtol=0, atol=1e-12)


@pytest.mark.skipif(not ragged_attention_cpu.available(), reason="no native kernel")
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(("each", "dtype"), runs(*CASES, *LONG), ids=str)
def test_on_a_cpu(each: Case, dtype: torch.dtype, int8: bool) -> None:
    inputs = make_inputs(each, dtype)
    check("cpu", inputs.with_int8_pools() if int8 else inputs)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize(("each", "dtype"), runs(*CASES), ids=str)
def test_in_tritons_interpreter(each: Case, dtype: torch.dtype, fp8: bool) -> None:
    inputs = make_inputs(each, dtype)
    check("triton", inputs.with_fp8_pools() if fp8 else inputs)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_selected_keys(implementation: str) -> None:
    inputs = make_inputs(case("", ((3, 20), (1, 33)), 6, 24, sinks=0.5, padding_rows=1), torch.float32)
    generator = torch.Generator().manual_seed(1)
    selection = torch.full((5, 7), -1, dtype=torch.int32)
    for row, position in enumerate((20, 21, 22, 33)):
        chosen = torch.randperm(position + 1, generator=generator)[: 7 - row].sort().values
        selection[row, : len(chosen)] = chosen
    check(implementation, inputs, selection)
    check(implementation, dataclasses.replace(inputs, softcap=2.0), selection)
    narrow = inputs.with_int8_pools() if implementation == "cpu" else inputs.with_fp8_pools()
    check(implementation, narrow, selection)
    check(implementation, dataclasses.replace(narrow, softcap=2.0), selection)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.function(*args, **options)


UNEVEN = ((3, 90), (1, 130), (5, 3))
# By the kernel that attends.
SPLIT = {
    latents: (case("", DECODE, 20, 40, sinks=0.5), case("", UNEVEN, 4, 24, window=60)),
    attends: (
        case("", UNEVEN, 24, 24, softcap=2.0, slopes=True, sinks=0.5),
        case("", UNEVEN, 4, 24, chunk=40, window=17),
        case("", UNEVEN, 4, 24, prefix=35),
    ),
}


def test_keys_are_split_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (latents, attends):
        monkeypatch.setattr(module, "split_config", lambda **sizes: tiles.SplitConfig(slots=24, shortest=16))
        merges = Counted(cuts.merge)
        monkeypatch.setattr(cuts, "merge", merges)
        for each in SPLIT[module]:
            check("triton", make_inputs(each, torch.float32))
            check("triton", make_inputs(each, torch.float32).with_fp8_pools())
        assert merges.calls == 2 * len(SPLIT[module])


def test_what_does_not_fit_is_refused() -> None:
    fit = make_inputs(case("", DECODE, 4, 20), torch.float32)
    two = make_inputs(dataclasses.replace(CASES[0], kv_heads=2), torch.float32)
    for inputs, size, message in (
        (fit, 21, "value_size must be at least 1 and at most 20, got 21"),
        (two, 16, "key must have one head, got 2"),
        (dataclasses.replace(fit, key_pool=fit.key_pool[..., :16]), 16, "key_pool must be .*, 20., got"),
        (dataclasses.replace(fit, key_pool=fit.key_pool.double()), 16, "key_pool must be torch.float32, torch.int8 or"),
        (dataclasses.replace(fit.with_fp8_pools(), key_scales=None), 16, "key_scales must be .1. torch.float32, got"),
        (dataclasses.replace(fit, key_scales=torch.ones(1)), 16, "key_scales must be None with pools of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            latent_ops._fake_latent_attention(*arguments(inputs, size))


def test_schema_and_fake() -> None:
    inputs = make_inputs(CASES[0], torch.float32)
    torch.library.opcheck(latent_ops.latent_attention, arguments(inputs), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("each", [*CASES, *LONG], ids=str)
def test_on_a_gpu(each: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(each, dtype)
    check_on_a_gpu(inputs)
    if torch.cuda.get_device_capability() >= (8, 9):
        check_on_a_gpu(inputs.with_fp8_pools())


def check_on_a_gpu(inputs: Inputs) -> None:
    expected = reference.latent_attention(*arguments(inputs.to(torch.float64)))
    on_gpu = [value.cuda() if isinstance(value, Tensor) else value for value in arguments(inputs)]
    output = latent_ops.latent_attention(*on_gpu)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=0, atol=TOLERANCE[output.dtype])
