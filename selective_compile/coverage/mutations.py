"""Models whose attention was changed: each must come out exact, as it now is, or be refused by name.

A proof that took a mask for what its name or its class says would pass unnoticed on the models as they are.  So every
score of a model is changed on its way into the softmax, and every mask on its way into
``scaled_dot_product_attention``, by a function of the two positions, while the model is traced and while it is run
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.backend import compile_step_program
from selective_compile.coverage.engine_trial import Served, serve
from selective_compile.coverage.measure import without_machine
from selective_compile.coverage.oracle import TOLERANCE, forward, furthest, takes_mask
from selective_compile.coverage.random_model import random_model, vocabulary_of
from selective_compile.coverage.trial import QUICK, Trial
from selective_compile.passes import RefusedError

# Scores or masks [..., S, S or more], query positions [S, 1], key positions [1, S or more] -> the same, changed
Change = Callable[[Tensor, Tensor, Tensor], Tensor]


def hidden(scores: Tensor, where: Tensor) -> Tensor:
    return scores.masked_fill(where, torch.finfo(scores.dtype).min)


def shown(scores: Tensor, where: Tensor) -> Tensor:
    return scores.masked_fill(where, 0.0)


MUTATIONS: Final[dict[str, Change]] = {
    "non-causal": lambda scores, i, j: shown(scores, j > i),
    "shifted": lambda scores, i, j: hidden(scores, (j == i) & (i > 0)),
    "widened": lambda scores, i, j: shown(scores, j == i + 1),
    "dropped row": lambda scores, i, j: hidden(scores, (i == 7) & (j < i)),
    "bias added": lambda scores, i, j: scores + 0.5 * ((i - j) % 3),
    "window added": lambda scores, i, j: hidden(scores, (i - j >= 3) & (j < i)),
}
# Of every way to attend: SDPA and eager chains; alternating layers, windows, chunks, sinks, softcap, linear biases,
# masks in buffers; grouped heads and latent keys; learned, rotary and the model's own positions; mixtures of experts.
MUTATED: Final = tuple(
    """
    bart bert bloom cohere2 deepseek_v3 falcon gemma2 gpt2 gpt_neo gpt_oss gptj granite_swa llama llama4_text mistral
    mpt openai-gpt opt phi3 qwen3_moe
    """.split()
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one changed model.

    Attributes:
        kind: ``exact``, ``refused``, ``wrong``, or ``no effect`` where the change does not show in its logits.
        error: of a logit, in units of the logits' spread, where it is not refused.
        reason: of the first refusal, with its source line.
    """

    kind: str
    error: float = 0.0
    reason: str = ""


@contextmanager
def attention_changed(change: Change) -> Iterator[None]:
    """Within, what `torch.nn.functional` has for attention is changed, for whoever calls it by that name."""
    softmax, sdpa = F.softmax, F.scaled_dot_product_attention

    def changed_softmax(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        extra = input.shape[-1] - input.shape[-2] if input.dim() > 2 else -1
        if dim in (-1, input.dim() - 1) and (extra == 0 or extra == 1):  # one more is a sink's
            input = changed(input)
        return softmax(input, dim=dim, dtype=dtype)

    def changed_sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        added = query.new_zeros(query.shape[-2], key.shape[-2])
        if is_causal:
            added = hidden(added, places(key.shape[-2])[None] > places(query.shape[-2])[:, None])
        if attn_mask is not None:
            added = hidden(added, ~attn_mask) if attn_mask.dtype == torch.bool else added + attn_mask
        return sdpa(query, key, value, attn_mask=changed(added), dropout_p=dropout_p, **options)

    def changed(scores: Tensor) -> Tensor:
        return change(scores, places(scores.shape[-2])[:, None], places(scores.shape[-1])[None])

    with mock.patch.multiple(F, softmax=changed_softmax, scaled_dot_product_attention=changed_sdpa):
        yield


def places(count: int) -> Tensor:
    return torch.arange(count)


def outcome(model_type: str, mutation: str, trial: Trial = QUICK) -> Outcome:
    """The engine's logits for the changed model against those of that model's own forward on each request alone.

    Raises:
        KeyError: there is no such mutation, or transformers does not know the type.
    """
    change, model = MUTATIONS[mutation], random_model(model_type)
    vocabulary = vocabulary_of(model)
    probe = trial.prompts(vocabulary)[2]
    plain = alone(model, probe)
    torch._dynamo.reset()
    with attention_changed(change):
        if furthest(alone(model, probe), plain) < TOLERANCE:
            return Outcome(kind="no effect")
        try:
            program = compile_step_program(model, dataclasses.replace(trial.engine_config, fallback="refuse"))
        except RefusedError as refused:
            first = refused.refusals[0]
            return Outcome(kind="refused", reason=f"{first.reason} (`{without_machine(first.source_line)}`)")
        served, _ = serve(model, program, trial, vocabulary)
        error = max(error_of(model, one) for one in served)
    return Outcome(kind="exact" if error < TOLERANCE else "wrong", error=error)


@torch.no_grad()
def alone(model: Any, tokens: list[int]) -> Tensor:
    """Logits ``[len(tokens), V]`` of the model's forward."""
    ids = torch.tensor([tokens])
    return forward(model, ids, torch.ones_like(ids) if takes_mask(model) else None)[0].float()


def error_of(model: Any, one: Served) -> float:
    """Of the logits that the engine chose tokens from, in units of their spread."""
    return furthest(one.logits, alone(model, [*one.prompt, *one.tokens])[len(one.prompt) - 1 : -1])
