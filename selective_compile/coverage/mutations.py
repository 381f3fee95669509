"""Models whose attention was changed: each must come out exact, as it now is, or be refused by name.

A proof that took a mask for what its name or its class says would pass unnoticed on the models as they are.  So every
score of a model is changed, once, on its way into the softmax, the ``logsumexp`` or the row that a sink is put behind,
and every mask on its way into ``scaled_dot_product_attention``, by a function of the two positions, while the model is
traced and while it is run alone, in steps with a cache too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal
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

# Scores or masks [..., Q, K], query positions [Q, 1], key positions [1, K] -> the same, changed in place
Change = Callable[[Tensor, Tensor, Tensor], Tensor]
First = Literal["softmax", "logsumexp", "cat"]


def hidden(scores: Tensor, where: Tensor) -> Tensor:
    return scores.masked_fill_(where, torch.finfo(scores.dtype).min)


def shown(scores: Tensor, where: Tensor) -> Tensor:
    return scores.masked_fill_(where, 0.0)


MUTATIONS: Final[dict[str, Change]] = {
    "non-causal": lambda scores, i, j: shown(scores, j > i),
    "shifted": lambda scores, i, j: hidden(scores, (j == i) & (i > 0)),
    "widened": lambda scores, i, j: shown(scores, j == i + 1),
    "dropped row": lambda scores, i, j: hidden(scores, (i == 7) & (j < i)),
    "bias added": lambda scores, i, j: scores.add_(0.5 * ((i - j) % 3)),
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
def attention_changed(change: Change, first: First = "softmax") -> Iterator[None]:
    """Within, what torch has for attention is changed, for whoever calls it by that name.

    ``first``: what the model hands its scores to, before it hands them to the softmax.
    """
    softmax, sdpa, cat, logsumexp = F.softmax, F.scaled_dot_product_attention, torch.cat, torch.logsumexp

    def changed_softmax(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        if dim in (-1, input.dim() - 1) and are_scores(input) and first == "softmax":
            input = changed(input.clone())
        return softmax(input, dim=dim, dtype=dtype)

    def changed_logsumexp(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # In place: the softmax that follows has to be of the same scores.
        return logsumexp(changed(input) if first == "logsumexp" and are_scores(input) else input, *args, **kwargs)

    def changed_cat(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        if first == "cat" and puts_sinks_behind(tensors):
            tensors = [changed(tensors[0].clone()), tensors[1]]
        return cat(tensors, *args, **kwargs)

    def changed_sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        # Of one token, the heads that share a key may stand where tokens do: the mask then has one row for them all.
        tokens = query.shape[-2] if attn_mask is None else attn_mask.shape[-2]
        added = query.new_zeros(tokens, key.shape[-2])
        if is_causal:
            added = hidden(
                added, torch.arange(key.shape[-2], device="cpu")[None] > torch.arange(tokens, device="cpu")[:, None]
            )
        if attn_mask is not None:
            hides = attn_mask.dtype == torch.bool
            added = added.masked_fill(~attn_mask, torch.finfo(added.dtype).min) if hides else added + attn_mask
        return sdpa(query, key, value, attn_mask=changed(added), dropout_p=dropout_p, **options)

    def changed(scores: Tensor) -> Tensor:
        queries, keys = torch.arange(scores.shape[-2], device="cpu"), torch.arange(scores.shape[-1], device="cpu")
        if not is_square(scores):
            queries = queries + (scores.shape[-1] - scores.shape[-2])  # the last of those that have keys
        return change(scores, queries[:, None], keys[None])

    with (
        mock.patch.multiple(F, softmax=changed_softmax, scaled_dot_product_attention=changed_sdpa),
        mock.patch.multiple(torch, cat=changed_cat, logsumexp=changed_logsumexp),
    ):
        yield


def puts_sinks_behind(tensors: Any) -> bool:
    sinks = len(tensors) == 2 and tensors[1].dim() > 2 and tensors[1].shape[-1] == 1
    return sinks and are_scores(tensors[0])


def are_scores(tensor: Tensor) -> bool:
    """Of all tokens with each other, or [B, H, 1, K] of one with those in a cache."""
    return tensor.dim() > 2 and (is_square(tensor) or (tensor.dim() == 4 and tensor.shape[-2] == 1))


def is_square(tensor: Tensor) -> bool:
    return tensor.shape[-1] == tensor.shape[-2]


def outcome(model_type: str, mutation: str, trial: Trial = QUICK) -> Outcome:
    """The engine's logits for the changed model against those of that model's own forward on each request alone.

    Raises:
        KeyError: there is no such mutation, or transformers does not know the type.
    """
    change, model = MUTATIONS[mutation], random_model(model_type)
    vocabulary = vocabulary_of(model)
    probe = trial.prompts(vocabulary)[2]
    with (
        mock.patch.object(torch, "logsumexp", wraps=torch.logsumexp) as summed,
        mock.patch.object(torch, "cat", wraps=torch.cat) as joined,
    ):
        plain = alone(model, probe)
    first: First = "softmax"
    if any(are_scores(call.args[0]) for call in summed.call_args_list):
        first = "logsumexp"
    elif any(puts_sinks_behind(call.args[0]) for call in joined.call_args_list if call.args):
        first = "cat"
    torch._dynamo.reset()
    with attention_changed(change, first):
        if furthest(alone(model, probe), plain) < TOLERANCE:
            return Outcome(kind="no effect")
        try:
            program = compile_step_program(model, dataclasses.replace(trial.engine_config, fallback="refuse"))
        except RefusedError as refused:
            refusal = refused.refusals[0]
            return Outcome(kind="refused", reason=f"{refusal.reason} (`{without_machine(refusal.source_line)}`)")
        served, _ = serve(model, program, trial, vocabulary)
        error = max(error_of(model, one) for one in served)
    return Outcome(kind="exact" if error < TOLERANCE else "wrong", error=error)


@torch.no_grad()
def alone(model: Any, tokens: list[int]) -> Tensor:
    """Logits ``[len(tokens), V]`` of the model's forward."""
    ids = torch.tensor([tokens], device="cpu")
    return forward(model, ids, torch.ones_like(ids) if takes_mask(model) else None)[0].float()


def error_of(model: Any, one: Served) -> float:
    """Of the logits that the engine chose tokens from, in units of their spread."""
    return furthest(one.logits, alone(model, [*one.prompt, *one.tokens])[len(one.prompt) - 1 : -1])
