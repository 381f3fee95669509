"""Checks of the GPU benchmark's other cells: what a kernel gets right passes, and what it does not, does not."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts import (
    attention,
    attention_peers,
    attention_variants,
    choice,
    jobs,
    joined,
    kept_otherwise,
    kernel_times,
    mixed,
    rotary,
    tiles,
    timing,
)
from benchmarks.gpu_parts.failures import DeviceLost
from benchmarks.gpu_parts.floors import Ceilings
from benchmarks.gpu_parts.jobs import Job, perform
from benchmarks.gpu_parts.profiled import Ran
from benchmarks.gpu_parts.ragged_step import TINY, AttentionShape, in_eight_bits, make_step
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.step_check import check, nan_filled_outputs
from selective_compile import reference
from selective_compile.kernels import choose_triton
from selective_compile.kernels import ragged_attention_attend_triton as attends
from selective_compile.kernels.one_step import once
from selective_compile.kernels.ragged_attention_tiles import tile_config
from tests.gpu_job import a_job

CPU = torch.device("cpu")
STEP = ((3, 40), (1, 33))


def test_keys_and_values_in_eight_bits() -> None:
    step = in_eight_bits(make_step(STEP, TINY, CPU))
    with nan_filled_outputs():
        right = step()
    assert check(step, right) < 1e-5 and step.kv_bytes == 73 * 2 * TINY.kv_heads * TINY.head_size
    with pytest.raises(ValueError, match="error of a row must be at most"):
        check(step, 1.1 * right)
    assert step.key_scales is not None
    with pytest.raises(ValueError, match="written to their slots"):
        check(replace(step, key_scales=2 * step.key_scales), right)
    step.key_pool[step.slot_mapping[2] // TINY.block_size] = 0.0
    with pytest.raises(ValueError, match="written to their slots"):
        check(step, right)


def test_latents() -> None:
    step = kept_otherwise.make_latents(STEP, replace(TINY, head_size=18), CPU)
    with nan_filled_outputs():
        right = step()
    assert right.shape == (4, TINY.heads, 16) and check(step, right) < 1e-5
    assert step.kv_bytes == 73 * 18 * 4 and step.flops == 2 * (40 + 39 + 38 + 33) * TINY.heads * (18 + 16)
    with pytest.raises(ValueError, match="error of a row must be at most"):
        check(step, right.flip(1))


def test_mixed_steps_are_on_both_sides_of_where_tiles_become_tall() -> None:
    """The launch's own choice, with the heads of the 8B."""
    found: Any = SimpleNamespace(tiny=False, quick=False)
    whole, low, tall = (step.both for step in mixed.mixed_steps(found))
    assert low[:-1] == tall[:-1] and (low[-1], tall[-1]) == ((257, 16_641), (258, 16_642))

    def rows(step: tuple[tuple[int, int], ...]) -> int:
        sizes: Any = {"group": 4, "key_size": 128, "value_size": 128, "bytes_per_element": 2, "block_size": 64}
        count = sum(rows for rows, _ in step)
        return tile_config(num_rows=count, num_requests=len(step), bulk=True, **sizes).block_m

    assert (rows(low), rows(tall), rows(whole)) == (16, 128, 128)


def test_a_mixed_step_beyond_its_bar_says_so() -> None:
    rows: list[Row] = []
    context: Any = SimpleNamespace(tell=rows.append, job=Job(part="attention", name="mixed", seconds=1, ceilings=None))
    mixed.tell(context, "mixed", [1e-3, 2e-3, 3e-3], {"both_timed_by": "graph"})
    mixed.tell(context, "mixed", [1e-3, 2e-3, 3.9e-3], {})
    assert rows[0].figures["both_timed_by"] == "graph"
    assert [row.figures["over_sum"] for row in rows] == pytest.approx([1.0, 1.3])
    assert ["failed" in row.text for row in rows] == [False, True]


def test_variants_of_attention_are_checked_as_such() -> None:
    found = attention_variants.variants(SimpleNamespace(tiny=True))  # type: ignore[arg-type]
    assert found.pop("heads of 64")[0].head_size == 64
    for _, make in found.values():
        step = make(STEP, TINY, CPU)
        with nan_filled_outputs():
            right = step()
        assert check(step, right) < 1e-5
        with pytest.raises(ValueError, match="error of a row must be at most"):
            check(replace(step, window=0, softcap=0.0, sinks=None), right)
    assert step.kv_bytes == 73 * 2 * 4 * TINY.kv_heads * TINY.head_size
    assert replace(step, window=9).kv_bytes == (11 + 9) * 2 * 4 * TINY.kv_heads * TINY.head_size


def test_candidates_of_tiles_are_what_is_launched_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    chosen = attends.tile_config

    def noted(**step: Any) -> Any:
        tile = chosen(**step)
        seen.append(tile.block_m)
        return tile

    monkeypatch.setattr(attends, "tile_config", noted)
    prompt = make_step(((40, 40),), TINY, CPU)
    with tiles.changed_tiles({"block_m": 64, "num_warps": 4}), nan_filled_outputs():
        assert attends.tile_config is not noted
        right = prompt()
    assert attends.tile_config is noted and check(prompt, right) < 1e-5 and seen == [32]
    rows: list[Row] = []
    perform(a_job(part="attention", name="tiles", ceilings=Ceilings(1e12, 1e12)), rows.append)
    assert [row.state for row in rows] == ["measured"] * (len(tiles.LOW) + len(tiles.TALL))


def test_kernels_of_some_cells_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind all that is timed, with none of the keys shared out; and not where there is no time."""
    calls: list[bool] = []

    class Step:
        def __call__(self) -> None:
            once("key", lambda: calls.append(True))
            calls.append(False)

    def on_device(run: Any) -> Any:
        before = len(calls)
        run()
        assert calls[before:] == [False]
        return [Ran("_write_kernel", 0.0, 2.0), Ran("attention_kernel", 3.0, 10.0)], 1.0

    monkeypatch.setattr(kernel_times, "make_step", lambda *what: Step())
    monkeypatch.setattr(kernel_times, "on_device", on_device)
    rows: list[Row] = []
    job = a_job(part="attention", name="decode")
    kernel_times.tell_kernels(jobs.Context(job, rows.append), [("3 x 40", STEP)])
    assert [row.name for row in rows] == ["decode: all timed", "decode: kernels"]
    assert rows[1].figures == {"microseconds": {"3 x 40": {"_write_kernel": 2.0, "attention_kernel": 7.0}}}
    assert rows[1].text == "3 x 40: write 2.0, attention 7.0 us"
    kernel_times.tell_kernels(jobs.Context(replace(job, seconds=1.0), rows.append), [("3 x 40", STEP)])
    kernel_times.tell_kernels(jobs.Context(replace(job, done=("decode: kernels",)), rows.append), [("3 x 40", STEP)])
    assert [row.state for row in rows[2:]] == ["measured", "skipped", "measured"]


def test_a_layer_shares_out_no_keys_but_the_first() -> None:
    shared_out: list[int] = []

    def seconds(call: Any, repeats: int) -> float:
        """Of a layer by itself 32 us, and twice as many where it shares out keys; a third less behind another."""
        before, calls = len(shared_out), len(called)
        call()
        call()
        several = (len(called) - calls) // 2
        return several * (24e-6 if several > 1 else 64e-6 if len(shared_out) > before + 1 else 32e-6)

    called: list[int] = []

    def layer() -> None:
        called.append(1)
        once("key", lambda: shared_out.append(1))

    timer: Any = SimpleNamespace(seconds=seconds, about=lambda whose: {f"{whose}timed_by": "graph"})
    times, about = attention.of_a_layer([layer] * 3, timer, 1)
    assert (times.behind, times.alone, times.first) == (pytest.approx(24e-6), 32e-6, 64e-6)
    assert times.mean == pytest.approx(25e-6) and about == {"layers_timed_by": "graph"}


def test_layers_of_a_step_have_keys_and_values_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(STEP, TINY, CPU)
    monkeypatch.setattr(
        attention, "free_bytes", lambda device: attention.SPARE + 3 * attention.bytes_needed(STEP, TINY)
    )
    layers = attention.layers_like(step)
    assert len(layers) == 4 and layers[0] is step
    assert len({each.key_pool.data_ptr() for each in layers}) == len({each.query.data_ptr() for each in layers}) == 4
    assert {each.context_lens.data_ptr() for each in layers} == {step.context_lens.data_ptr()}
    assert {each.cu_seqlens_q.data_ptr() for each in layers} == {step.cu_seqlens_q.data_ptr()}
    monkeypatch.setattr(attention, "OF_NO_CACHE", 1)
    assert attention.layers_like(step) == [step, step]


def test_peers_begin_with_the_cells_that_say_most() -> None:
    context: Any = SimpleNamespace(tiny=False, quick=False)
    names = [name for name, _ in attention_peers.cells(context)]
    assert names[:4] == ["decode 32 x 4096", "decode 128 x 4096", "prefill 4096", "prefill 16384"]
    assert names[4].startswith("mixed") and len(set(names)) == len(names) == 21


def test_sizes_of_deepseek() -> None:
    shape = AttentionShape(heads=128, kv_heads=1, head_size=kept_otherwise.LATENT + kept_otherwise.REST)
    step = kept_otherwise.make_latents(((1, 3),), shape, CPU)
    assert step.value_size == 512 and step.kv_bytes == 3 * 576 * 2


def test_rotation_in_the_launch_that_writes() -> None:
    step = make_step(STEP, TINY, CPU)
    tables = rotary.angles(step)
    query, key = reference.rotated_heads(step.query, step.key, *tables, *rotary.plain(step))
    as_models_do = rotary.rotate(step.query, step.key, *tables)
    torch.testing.assert_close(as_models_do, (query, key))
    with nan_filled_outputs():
        right = rotary.fused(step, tables)()
    assert check(replace(step, query=query, key=key), right, 1e-5) < 1e-5
    with pytest.raises(ValueError, match="written to their slots"):
        check(step, right, 1e-5)
    beside = rotary.apart(rotary.rotate)(step, tables)()
    torch.testing.assert_close(beside, right)


def test_joined_products() -> None:
    torch.manual_seed(0)
    x, whole = joined.operands(3, 64, 32, CPU)
    parts = whole.split([16, 8, 8])
    joined.check(x, whole, joined.joined(x, whole), joined.apart(x, parts))
    assert joined.apart(x, parts)()[1].shape == (3, 8)
    for wrong in (parts[::-1], [*parts[:2], parts[2] * torch.nan]):
        with pytest.raises(ValueError, match="the error of products apart must be at most"):
            joined.check(x, whole, joined.joined(x, whole), joined.apart(x, wrong))
        with pytest.raises(ValueError, match="the error of joined products must be at most"):
            joined.check(x, whole, joined.joined(x, torch.cat(list(wrong))), joined.apart(x, parts))


def test_shapes_of_joined_products() -> None:
    """Of the 8B."""
    context = SimpleNamespace(tiny=False, quick=False)
    found = {name: (count, depth, sizes) for name, count, depth, sizes in joined.cells(context)}  # type: ignore[arg-type]
    assert len(found) == 2 * len(joined.ROWS)
    assert found["query, key and value joined, 8 rows"] == (8, 4096, (4096, 1024, 1024))
    assert found["gate and up joined, 256 rows"] == (256, 4096, (14_336, 14_336))


@pytest.mark.parametrize("how", choice.DRAWN)
def test_tokens_that_are_chosen(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, fields = 3 * torch.randn(5, 200), choice.drawn(5, choice.DRAWN[how], CPU)
    choice.check(logits, None)
    choice.check(logits, fields)
    right = choose_triton.choose
    monkeypatch.setattr(choose_triton, "choose", lambda *what, **rest: right(*what, **rest).flip(0))
    with pytest.raises(ValueError, match="tokens must be those of the definition"):
        choice.check(logits, fields)


@pytest.mark.parametrize("name", ["decode", "choice", "joined"])
def test_a_cell_that_fails_while_it_is_timed_leaves_the_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    seconds = timing.Timer.seconds
    calls: list[int] = []

    def failing(timer: timing.Timer, call: Any, repeats: int) -> float:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("no such kernel")
        return seconds(timer, call, repeats)

    monkeypatch.setattr(timing.Timer, "seconds", failing)
    perform(a_job(part="attention", name=name, ceilings=Ceilings(1e12, 1e12)), rows.append)
    assert [row.state for row in rows].count("failed") == 1 and rows[0].text == "KeyError: 'no such kernel'"
    assert "in failing" in rows[0].detail and len(rows) > 1


@pytest.mark.parametrize("name", ["decode", "choice", "joined", "mixed"])
def test_cells_that_there_are_already_are_not_made_again(name: str) -> None:
    rows: list[Row] = []
    again: list[Row] = []
    job = a_job(part="attention", name=name, ceilings=Ceilings(1e12, 1e12))
    perform(job, rows.append)
    perform(replace(job, done=(rows[0].name,)), again.append)
    assert {row.name for row in again} == {row.name for row in rows[1:]}


@pytest.mark.parametrize("lost", [True, False])
def test_behind_an_error_that_stays_nothing_is_tried(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    monkeypatch.setattr(jobs, "is_lost", lambda device: lost)

    def failing(*what: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")

    monkeypatch.setattr(attention, "_cell", failing)
    context = jobs.Context(a_job(part="attention", name="decode", ceilings=Ceilings(1e12, 1e12)), rows.append)
    with pytest.raises(DeviceLost) if lost else contextlib.nullcontext():
        attention.run(context)
    assert [row.state for row in rows].count("failed") == (1 if lost else 2)
    assert rows[0].text == "RuntimeError: CUDA error: an illegal memory access was encountered"
