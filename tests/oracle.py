"""The oracle: Hugging Face's own model, on one request alone, eager attention, float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Where the two largest logits are closer than this, either token is right: compare logits there instead.
MARGIN = 1e-4


@torch.no_grad()
def reference_logits(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits ``[len(tokens), V]`` that the model gives for each generated token, from the request alone."""
    ids = torch.tensor([[*prompt, *tokens]])
    result: Any = model(ids)
    logits = result.logits if hasattr(result, "logits") else result
    return logits[0, len(prompt) - 1 : -1].float()


def assert_same_tokens(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Each token is the one that the model alone would take after those before it; returns how many were near ties."""
    logits = reference_logits(model, prompt, tokens)
    top = logits.topk(2, dim=-1)
    near = 0
    for step, token in enumerate(tokens):
        if token == int(top.indices[step, 0]):
            continue
        behind = float(top.values[step, 0] - logits[step, token])
        assert behind < MARGIN, f"token {step} is {token}, alone it is {int(top.indices[step, 0])} by {behind}"
        near += 1
    return near


def assert_generated_alone(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """`generate` gives these tokens, up to the first where the two that differ are nearly tied."""
    theirs = generated_alone(model, prompt, len(tokens))
    if theirs == list(tokens):
        return
    first = next(step for step, pair in enumerate(zip(theirs, tokens, strict=True)) if pair[0] != pair[1])
    logits = reference_logits(model, prompt, tokens)[first]
    apart = abs(float(logits[theirs[first]] - logits[tokens[first]]))
    assert apart < MARGIN, f"token {first} is {tokens[first]}, generate gives {theirs[first]}: {apart} apart"


def generated_alone(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Hugging Face's own greedy tokens."""
    ids = torch.tensor([list(prompt)])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
    )
    return result[0, len(prompt) :].tolist()
