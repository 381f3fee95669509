"""The arithmetic of the GPU benchmark: floors, shares, worst over best, covered time, and the time that is left."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_parts.floors import (
    Ceilings,
    StepWork,
    attention_flops,
    busy_seconds,
    idle_share,
    kv_bytes,
    share,
    spread,
)
from benchmarks.gpu_parts.isolated import GRACE
from benchmarks.gpu_parts.jobs import SECONDS, WEIGHTS, Allowance
from benchmarks.gpu_parts.measures import MODEL
from benchmarks.gpu_parts.models import SHAPES, random_model, step_work
from benchmarks.gpu_parts.steps import COUNTS
from selective_compile.bench.floor import experts_hit

CEILINGS = Ceilings(4.0e12, 8.0e14)


def test_a_step_is_bound_by_its_weights_or_by_its_products_and_reads_keys_and_values_beside() -> None:
    work = StepWork(weight_bytes=16_000_000_000, flops_per_token=16_000_000_000, kv_bytes_per_token=131_072)
    alone = work.floor_seconds([1000], CEILINGS)
    assert alone == pytest.approx(4e-3 + 1000 * 131_072 / 4.0e12)
    many = work.floor_seconds([1000] * 400, CEILINGS)
    assert many == pytest.approx(8e-3 + 400_000 * 131_072 / 4.0e12)


def test_a_mixture_reads_the_experts_that_are_hit() -> None:
    assert experts_hit(32, 4, 1) == pytest.approx(4)
    assert experts_hit(32, 4, 2) == pytest.approx(4 + 4 * 28 / 32)
    assert experts_hit(32, 4, 10_000) == pytest.approx(32)
    assert experts_hit(0, 0, 5) == 0
    work = StepWork(weight_bytes=100, flops_per_token=0, kv_bytes_per_token=0, expert_bytes=10, experts=32, chosen=4)
    assert work.read(1) == pytest.approx(140)


def test_bytes_and_operations_of_attention() -> None:
    assert kv_bytes(1024, 8, 128, 2) == 4096 * 1024
    assert attention_flops(1, 100, 32, 128) == 4 * 100 * 32 * 128
    whole, first = attention_flops(64, 64, 2, 16), attention_flops(24, 24, 2, 16)
    assert whole == first + attention_flops(40, 64, 2, 16)
    seen = sum(min(position + 1, 9) for position in range(3, 20))
    assert attention_flops(17, 20, 2, 16, window=9) == 4 * seen * 2 * 16
    assert attention_flops(17, 20, 2, 16, window=20) == attention_flops(17, 20, 2, 16)


def test_shares() -> None:
    assert share(4.3e9, 2e-3, 4.3e12) == pytest.approx(0.5)
    assert idle_share(3.0, 4.0) == 0.25 and idle_share(4.1, 4.0) == 0
    assert spread([0.5, 0.8, 0.4]) == (0.4, 0.5)
    assert spread([]) is None


def test_overlapping_spans_count_once() -> None:
    assert busy_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4.0
    assert busy_seconds([]) == 0


def test_a_part_hands_on_the_time_that_it_did_not_need() -> None:
    now = 0.0
    allowance = Allowance(("ceilings", "trace"), SECONDS["ceilings"] + SECONDS["trace"], clock=lambda: now)
    assert allowance.of("ceilings", ["ceilings"]) == SECONDS["ceilings"]
    now = 5.0
    left, weights = SECONDS["ceilings"] + SECONDS["trace"] - 5, WEIGHTS["trace"]
    assert allowance.of("trace", list(weights)) == pytest.approx(left * weights["engine"] / sum(weights.values()))
    assert allowance.left == left
    now = 1e4
    assert allowance.left < 0
    assert allowance.of("trace", ["generate"]) == 0


def test_all_time_together_is_under_eight_minutes() -> None:
    assert sum(SECONDS.values()) + 2 * GRACE <= 7.5 * 60 and set(SECONDS) == set(WEIGHTS)


def test_what_has_bars_has_most_of_the_time() -> None:
    assert WEIGHTS["attention"]["decode"] == max(WEIGHTS["attention"].values())
    assert (
        WEIGHTS["steps"][MODEL] > sum(WEIGHTS["steps"].values()) - WEIGHTS["steps"][MODEL] - WEIGHTS["steps"]["tokens"]
    )
    assert COUNTS == (1, 8, 32, 128, 256), "what is profiled behind them needs no prompt"


def test_the_engine_has_a_minute_for_the_trace() -> None:
    """For a model, what is compiled of it, two samples, and the trace at the 7,400 tokens a second of its bar."""
    weights = WEIGHTS["trace"]
    assert SECONDS["trace"] * weights["engine"] / sum(weights.values()) >= 60


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.03), ("llama-3.2-1b", 1.236), ("qwen3-0.6b", 0.596)])
def test_shapes_are_those_of_the_models(name: str, billions: float) -> None:
    model = random_model(name, torch.device("meta"), tiny=False)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert model.dtype is torch.bfloat16


def test_the_work_of_a_model_is_counted_from_its_matrices() -> None:
    eight = step_work(random_model("llama-3.1-8b", torch.device("meta"), tiny=False))
    assert eight.weight_bytes == pytest.approx(15.0e9, rel=2e-3) and eight.kv_bytes_per_token == 131_072
    assert eight.flops_per_token == eight.weight_bytes and eight.experts == 0
    mixture = step_work(random_model("qwen3-moe-small", torch.device("meta"), tiny=False))
    of_one = 3 * 2048 * 768 * SHAPES["qwen3-moe-small"]["num_hidden_layers"]
    assert mixture.expert_bytes == 2 * of_one and (mixture.experts, mixture.chosen) == (32, 4)
    assert mixture.flops_per_token == mixture.weight_bytes + 2 * 4 * of_one
