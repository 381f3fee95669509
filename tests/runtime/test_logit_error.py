"""How far logits are moved: of models whose logits are odd, and with pools for the prompts alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.options import EngineConfig
from selective_compile.runtime.logit_error import LogitError, _Sums, logit_error
from tests.decoders import VOCABULARY, Decoder

CONFIG = EngineConfig(compile=False, weights="int8")
PROMPTS = [[5, 6, 7, 8, 9, 3], [1], list(range(40))]


HIDDEN = [-math.inf, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min]


class Odd(Decoder):
    """Whose logits are made into others."""

    def __init__(self, factor: float, hidden: float = 0.0) -> None:
        super().__init__(layers=1)
        self.factor = factor
        self.register_buffer("hidden", torch.where(torch.arange(VOCABULARY) < 7, hidden, 0.0))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, attention_mask) * self.factor + self.hidden


def error_of(model: Any, config: EngineConfig = CONFIG) -> LogitError:
    return logit_error(model, PROMPTS, config)


def error_between(exact: Tensor, found: Tensor) -> LogitError:
    sums = _Sums()
    sums.add(exact, found, torch.zeros(len(exact), dtype=torch.int64))
    return sums.result(1, 1)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_tokens_that_are_never_given_count_for_nothing(hidden: float) -> None:
    exact = torch.randn(5, 20)
    found = exact + torch.randn(5, 20) / 10
    plain = error_between(exact, found)
    wide = torch.full((5, 3), hidden)
    assert error_between(torch.cat([exact, wide], 1), torch.cat([found, wide], 1)) == plain
    assert 0.05 < plain.mean_error < 0.2 and plain.spread == pytest.approx(float(exact.std(-1).mean()))
    # But if only one of the two gives them.
    assert not error_between(torch.cat([exact, wide], 1), torch.cat([found, torch.zeros(5, 3)], 1)).largest_error < 10
    assert not error_between(torch.cat([exact, torch.zeros(5, 3)], 1), torch.cat([found, wide], 1)).largest_error < 10


def test_a_perplexity_beyond_all_floats_is_infinite() -> None:
    error = error_of(Odd(1e3, HIDDEN[1]))
    assert error.perplexity == error.exact_perplexity == math.inf
    assert error.tokens == 47 and 0.001 < error.mean_error < 0.2 and 100 < error.spread < 1e5


def test_a_logit_that_is_no_number_is_not_hidden() -> None:
    sums, exact = _Sums(), torch.randn(2, 3)
    for found in (exact + torch.tensor([0, torch.nan, 0]), exact + 1):
        sums.add(exact, found, torch.tensor([0, 1]))
    assert math.isnan(sums.result(1, 1).largest_error) and math.isnan(sums.result(1, 1).mean_error)


def test_logits_that_are_all_alike() -> None:
    error = error_between(torch.zeros(2, 3), torch.zeros(2, 3))
    assert (error.spread, error.mean_error, error.largest_error) == (0.0, 0.0, 0.0)
    assert error_between(torch.zeros(2, 3), torch.ones(2, 3)).mean_error == math.inf


def test_pools_hold_the_longest_prompt_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from selective_compile.runtime import model_runner

    sizes = []
    allocate = model_runner.allocate_pools

    def noting(sites: Any, blocks: Any, block_size: int, *device: Any) -> Any:
        if any(blocks):
            sizes.append([count * block_size for count in blocks])
        return allocate(sites, blocks, block_size, *device)

    monkeypatch.setattr(model_runner, "allocate_pools", noting)
    error_of(Decoder(layers=1))
    assert sizes == [[64], [64]]  # 40 tokens and one, in blocks of 32
