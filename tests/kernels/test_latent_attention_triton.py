"""Triton's kernel for latents: which tile a step has, tiles read by bulk copies, what is compiled for four targets."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from selective_compile.passes.latents import MOST_BESIDE
from tests.kernels.ragged_cases import MIXED, PREFILL, Inputs, make_inputs
from tests.kernels.test_latent_attention import CASES, VALUES, case, check, nan_filled_outputs  # noqa: F401
from tests.kernels.test_ragged_attention_triton import COMPARED, triton_cache  # noqa: F401

triton = pytest.importorskip("triton")
latents = pytest.importorskip("selective_compile.kernels.latent_attention_triton")
tiles = pytest.importorskip("selective_compile.kernels.latent_attention_tiles")
splits = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
TARGETS = ahead.TARGETS
compiling = pytest.mark.skipif(
    not isinstance(latents._latent_kernel, triton.JITFunction),
    reason="TRITON_INTERPRET is set: kernels cannot be compiled",
)


def tile_of(heads: int, *, rows: int = 8, **changes: Any) -> Any:
    """For 8 requests of 16 bits on Hopper, but for the changes."""
    given = {
        "bytes_per_element": 2,
        "narrow": False,
        "selected": False,
        "shared_memory": 227 * 1024,
        "block_size": 64,
        "window": 0,
        "width": 512 + 64,
        "bulk": True,
        "backend": "cuda",
    } | changes
    return tiles.latent_tile(num_rows=rows, num_requests=8, heads=heads, **given)


def test_copies_begin_an_iteration_ahead_where_there_is_room_for_two() -> None:
    stages = [tile_of(128, width=512 + rest).num_stages for rest in (64, 128, 256, 512)]
    assert stages == [5, 5, 2, 2]
    assert tile_of(128, width=512 + 256, narrow=True).num_stages == 5


def test_a_tile_has_as_many_heads_as_fit_and_rows_where_there_are_fewer() -> None:
    def shape(*args: Any, **changes: Any) -> tuple[int, int]:
        tile = tile_of(*args, **changes)
        return tile.block_q, tile.block_h

    assert shape(128) == shape(128, rows=512) == (1, 32)
    assert (shape(16), shape(16, rows=512)) == ((1, 16), (2, 16))
    assert (shape(5), shape(5, rows=512)) == ((2, 8), (4, 8))
    assert shape(4, rows=512, selected=True) == shape(16, rows=512, selected=True) == (1, 16)
    assert shape(128, backend="hip") == shape(128, bytes_per_element=4) == (1, 16)


def test_a_bulk_copy_is_a_part_of_one_block() -> None:
    for changes in ({"block_size": 64}, {"block_size": 256}, {"block_size": 96, "narrow": True}):
        tile = tile_of(128, **changes)
        assert tile.bulk and changes["block_size"] % tile.block_n == 0
    for changes in (
        {"block_size": 32},
        {"block_size": 100},
        {"bulk": False},
        {"bytes_per_element": 4},
        {"selected": True},
    ):
        assert not tile_of(128, **changes).bulk


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The device has bulk copies; whether each launch of the kernel made use of them."""
    made: list[bool] = []
    described = latents._tiles

    def noted(*args: Any, **options: Any) -> Any:
        found = described(*args, **options)
        made.append(found[0] is not None)
        return found

    monkeypatch.setattr(latents, "bulk_copies", lambda device: True)
    monkeypatch.setattr(latents, "_tiles", noted)
    return made


NAMES = ("decode", "prefill", "mixed", "as_large_as_deepseek", "window", "sinks", "no_request")
LONG = case("long", ((70, 150), (1, 190), (130, 0)), 4, 40)
ODD = case("latents_of_48", ((70, 150), (1, 190)), 4, 56)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("each", [each for each in CASES if each.name in NAMES] + [LONG, ODD], ids=str)
def test_bulk_copies(each: Any, launches: list[bool]) -> None:
    """What no row sees holds NaN, slots behind the context in blocks that are read among it."""
    # Rows that a descriptor can tell: 24 numbers of 16 bits, not 20.
    size = {20: 24}.get(each.key_size, each.key_size)
    inputs = make_inputs(dataclasses.replace(each, block_size=64, key_size=size, value_size=size), torch.bfloat16)
    check("triton", inputs)
    assert launches == [True]
    if size % 16 == 0:
        check("triton", inputs.with_fp8_pools())
        assert launches == [True, True]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
def test_bulk_copies_of_what_is_split(launches: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "split_config", lambda **sizes: splits.SplitConfig(slots=24, shortest=16))
    for each in (LONG, dataclasses.replace(LONG, window=90, name="window")):
        check("triton", make_inputs(dataclasses.replace(each, block_size=64), torch.bfloat16))
    assert launches == [True, True]


def test_rows_that_no_descriptor_can_tell_are_read_by_their_addresses(
    launches: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(block_size: int, size: int) -> Inputs:
        return make_inputs(case("", MIXED, 4, size, block_size=block_size), torch.bfloat16)

    check("triton", of(64, 20))
    check("triton", of(16, 24))
    check("triton", make_inputs(case("", PREFILL, 4, 24, block_size=64), torch.float32))
    monkeypatch.setitem(VALUES, 40, 36)  # what is behind the latents begins between two multiples of 16 bytes
    check("triton", of(64, 40))
    assert launches == [False] * 4


FP8 = {"rows": "*fp8e4nv", "key_scales": "*fp32"}
SELECTION = {"COUNT": 2048, "selection": "*i32", "SPLIT": False}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("bf16", {}),
    "whole_keys": ("bf16", {"SPLIT": False}),
    "window_and_sinks": ("fp16", {"WINDOW": 128, "sinks": "*bf16", "SPLIT": False}),
    "blocks_of_16": ("bf16", {"BLOCK_SIZE": 16}),
    "selection": ("bf16", SELECTION),
    "float32": ("fp32", {}),
    "float32_window_and_sinks": ("fp32", {"WINDOW": 4096, "sinks": "*fp32"}),
    "float32_fp8": ("fp32", FP8),
    "fp8": ("bf16", FP8),
    "fp8_window_and_sinks": ("bf16", FP8 | {"WINDOW": 4096, "sinks": "*bf16"}),
    "fp8_selection": ("bf16", FP8 | SELECTION),
}
# Heads, rows of 8 requests, and what is compiled; with 16 heads the tile of a prefill has two rows.
LAUNCHED = [(128, 8, name) for name in VARIANTS] + [(16, 8, "step")]
LAUNCHED += [(16, 512, name) for name in ("step", "window_and_sinks", "selection", "fp8_window_and_sinks")]
# Of heads that fill no tile, and of a few, which have many rows.
LAUNCHED += [(12, 512, name) for name in ("step", "window_and_sinks")] + [(3, 512, "float32_window_and_sinks")]
LAUNCHED += [(20, 512, name) for name in ("float32_window_and_sinks", "fp8_window_and_sinks")]
# There are no numbers of e4m3 below compute capability 8.9.
COMPILED = [(target, *each) for each in LAUNCHED for target in TARGETS["fp8" in each[-1] :]]
OPTIONAL = ("sinks", "selection", "key_scales")


def compile_latents(target: Any, name: str, heads: int, rows: int, rest: int = 64) -> Any:
    """For a latent of 512 numbers and 64 more, or another `rest`, as the launcher would ask for it."""
    element, changes = VARIANTS[name]
    bulk = target.arch in (90, 100)
    width, block_size = 4 if element == "fp32" else 2, changes.get("BLOCK_SIZE", 64)
    window = changes.get("WINDOW", 0)
    stored = changes.get("rows", "*" + element)[1:]
    others = {"selected": "selection" in changes, "shared_memory": target.shared_memory}
    others |= {"bytes_per_element": width, "narrow": "fp8" in stored, "width": 512 + rest}
    tile = tile_of(heads, rows=rows, block_size=block_size, window=window, bulk=bulk, backend=target.backend, **others)
    types = dict.fromkeys(("output", "query"), "*" + element) | {"rows": "*" + stored}
    types |= dict.fromkeys(("sums", "maxima", "totals"), "*fp32")
    types |= dict.fromkeys(("pieces", "cu_seqlens_q", "context_lens", "block_table"), "*i32")
    types |= {name: changes[name] for name in OPTIONAL if name in changes}
    for name, padded in (("latent_tiles", 512), ("rest_tiles", rest)):
        types |= {name: f"tensordesc<{stored}[1, 1, {tile.block_n}, {padded}]>"} if tile.bulk else {}
    constants = {"SCALE": 0.1, "WINDOW": 0, "COUNT": 0, "HEADS": heads, "VALUE_SIZE": 512, "REST_SIZE": rest}
    constants |= {"BLOCK_Q": tile.block_q, "BLOCK_N": tile.block_n, "BLOCK_R": 512, "BLOCK_E": rest}
    constants |= {"BLOCK_H": tile.block_h, "BLOCK_SIZE": block_size}
    constants |= {"WIDEN": False, "SPLIT": True} | changes
    constants |= {} if tile.bulk else {"latent_tiles": None, "rest_tiles": None}
    constants = {name: value for name, value in constants.items() if name not in types}
    constants |= {name: None for name in OPTIONAL if name not in changes}
    constants |= {} if constants["SPLIT"] else dict.fromkeys(("pieces", "sums", "maxima", "totals"))
    return ahead.compile_ahead(latents._latent_kernel, target, types, constants, **tile.options(target.backend))


@compiling
@pytest.mark.parametrize(("target", "heads", "rows", "name"), COMPILED, ids=str)
def test_it_compiles_ahead_of_time_without_spills(target: Any, heads: int, rows: int, name: str, tmp_path: Any) -> None:
    ahead.assert_ships(compile_latents(target, name, heads, rows), tmp_path)


@compiling
@pytest.mark.parametrize(("name", "rest"), [("step", 128), ("step", MOST_BESIDE), ("float32", MOST_BESIDE // 2)])
@pytest.mark.parametrize("target", [*TARGETS, ahead.CONSUMER], ids=str)
def test_wider_rows_fit_into_shared_memory(target: Any, name: str, rest: int, tmp_path: Any) -> None:
    ahead.assert_ships(compile_latents(target, name, 128, 8, rest), tmp_path)


@compiling
@pytest.mark.parametrize(("heads", "rows", "name"), [(128, 8, "step"), (16, 512, "window_and_sinks"), (16, 8, "fp8")])
def test_it_fits_into_a_consumer_parts_shared_memory(heads: int, rows: int, name: str, tmp_path: Any) -> None:
    ahead.assert_ships(compile_latents(ahead.CONSUMER, name, heads, rows), tmp_path)


@compiling
@pytest.mark.parametrize("name", ["step", "window_and_sinks"])
@pytest.mark.parametrize("target", [TARGETS[1], TARGETS[3]], ids=str)
def test_keys_that_every_row_sees_are_compared_with_nothing(target: Any, name: str) -> None:
    masked, clear = ahead.innermost_loops(compile_latents(target, name, 128, 8))
    assert COMPARED.search(masked) and not COMPARED.search(clear)
    assert len(re.findall(r"tt\.dot ", clear)) == 3
    copies = len(re.findall("async_tma_copy_global_to_local", clear))
    assert copies == (2 if target.arch == 90 else 0)
    assert "async_tma_copy_global_to_local" not in masked
    if target.arch == 90:  # two buffers of latents, or the copy of an iteration would begin where it is waited for
        assert re.search(rf"memdesc<2x(1x1x)?{64 if name == 'step' else 32}x512x", clear)
