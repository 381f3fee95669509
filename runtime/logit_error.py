"""How far options that change results take the logits from the model's own: measured, on prompts of the user's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.generation_fields import FIELDS
from selective_compile.runtime.samples import Asked

# The options of EngineConfig that change results, and what leaves them as they are.
EXACT: dict[str, Any] = {"kv_dtype": "auto", "weights": "model", "max_attention_window": None}
# Up to here logits are what a model puts in the place of tokens that it never gives: -inf, or the least of a dtype.
NEVER = torch.finfo(torch.float16).min


@dataclass(frozen=True, kw_only=True)
class LogitError:
    """Logits of an engine with such options next to those of one without, over all tokens of some prompts.

    Attributes:
        tokens: how many rows of logits were compared.
        spread: the standard deviation of a row's exact logits, on average over the rows.
        mean_error, largest_error: of the logits, the root of the mean square of the differences, and the largest of
            them, over the spread.  Logits of tokens that the model never gives count in none of these.
        same_best: the share of the rows whose highest logit is that of the same token.
        exact_perplexity, perplexity: of the prompts, without the options and with them.
        exact_kv_bytes, kv_bytes: of a token, its keys and values in all layers.
    """

    tokens: int
    spread: float
    mean_error: float
    largest_error: float
    same_best: float
    exact_perplexity: float
    perplexity: float
    exact_kv_bytes: int
    kv_bytes: int

    def __str__(self) -> str:
        return (
            f"logits of {self.tokens} tokens: {self.mean_error:.2%} of their spread away on average, "
            f"{self.largest_error:.2%} at most; the same best token {self.same_best:.2%} of the time\n"
            f"perplexity {self.perplexity:.4f}, without {self.exact_perplexity:.4f}\n"
            f"keys and values of a token {self.kv_bytes} bytes, without {self.exact_kv_bytes}"
        )


def logit_error(model: nn.Module, prompts: Sequence[Sequence[int]], config: EngineConfig) -> LogitError:
    """Compare the configuration's logits with those of the same one without the options that change results.

    Both engines compute the prompts, one after another; the rows [tokens, V] of one prompt are held at a time.

    Args:
        prompts: token ids; what the model is to be used for tells most, and at least two tokens in one of them.
        config: an option in it changes results: `kv_dtype`, `weights` or `max_attention_window`.

    Raises:
        ValueError: nothing in the configuration changes results, or the model is refused, or a prompt.
    """
    config = replace(config, record=None)
    if replace(config, **EXACT) == config:
        raise ValueError(f"config must change results by one of {', '.join(EXACT)}, got {config}")
    if not any(len(prompt) > 1 for prompt in prompts):
        raise ValueError(f"prompts must have two tokens or more in one of them, got {len(prompts)} prompts")
    if config.max_kv_tokens is None:  # of free memory the first engine would leave the second what it does not need
        config = replace(config, max_kv_tokens=config.block_size + max(map(len, prompts)))
    engines = Engine(model, replace(config, **EXACT)), Engine(model, config)
    sums = _Sums()
    for prompt in prompts:
        expected, found = (prompt_logits(engine, prompt) for engine in engines)
        sums.add(expected, found, torch.tensor(list(prompt), device="cpu"))
    return sums.result(*(engine.kv_bytes_per_token for engine in engines))


def prompt_logits(engine: Engine, prompt: Sequence[int]) -> Tensor:
    """The rows [tokens, V] of a prompt, float32 on the CPU, each of them computed."""
    # Of the model's own configuration, nothing: it may ask for a tokenizer, or for samples.
    options = {**dict.fromkeys(FIELDS), "max_new_tokens": 1, "do_sample": False, "num_beams": 1, "prompt_logits": True}
    (request,) = engine.submit_samples(prompt, [Asked(config=GenerationConfig(), options=options)])
    result = request.result()
    if result.prompt_logits is None or len(result.prompt_logits) != len(prompt):
        raise RuntimeError(f"the prompt ended with {result.finish_reason!r}: {result.error}")
    rows: Tensor = result.prompt_logits
    return rows.cpu()


class _Sums:
    """Over the prompts so far."""

    def __init__(self) -> None:
        self._rows = self._predicted = self._same = self._elements = 0
        self._spread = self._squares = self._largest = self._exact_loss = self._loss = 0.0

    def add(self, exact: Tensor, found: Tensor, prompt: Tensor) -> None:
        """Logits [tokens, V] of both, and the tokens."""
        never = exact <= NEVER
        difference = (found - exact)[~(never & (found <= NEVER))]
        self._rows += len(exact)
        self._elements += len(difference)
        self._spread += sum(float(row[~hidden].std()) for row, hidden in zip(exact, never, strict=True))
        self._squares += float(difference.double().square().sum())
        largest = difference.abs().max()
        self._largest = float(torch.maximum(largest, largest.new_tensor(self._largest)))  # a NaN stays
        self._same += int((exact.argmax(-1) == found.argmax(-1)).sum())
        self._predicted += len(prompt) - 1
        self._exact_loss += _loss(exact, prompt)
        self._loss += _loss(found, prompt)

    def result(self, exact_kv_bytes: int, kv_bytes: int) -> LogitError:
        spread = self._spread / self._rows
        return LogitError(
            tokens=self._rows,
            spread=spread,
            mean_error=_over(math.sqrt(self._squares / self._elements), spread),
            largest_error=_over(self._largest, spread),
            same_best=self._same / self._rows,
            exact_perplexity=_perplexity(self._exact_loss / self._predicted),
            perplexity=_perplexity(self._loss / self._predicted),
            exact_kv_bytes=exact_kv_bytes,
            kv_bytes=kv_bytes,
        )


def _over(error: float, spread: float) -> float:
    """Infinite where all logits were alike and are not any more."""
    if not error:
        return 0.0
    return error / spread if spread else math.inf


def _perplexity(loss: float) -> float:
    """Infinite where it is more than the largest float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _loss(logits: Tensor, prompt: Tensor) -> float:
    """The sum over the tokens but the first of how little probability the row before gives them, in nats."""
    return float(-logits[:-1].log_softmax(-1).gather(1, prompt[1:, None]).double().sum())
