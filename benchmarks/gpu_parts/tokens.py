"""Whether an engine's tokens are those of the model itself, as transformers runs it: if not, no figure of it counts.

The model computes its logits over what the engine generated, request by request, and each token is to be its likeliest
one, but for near ties. How far one may be behind goes by the spread of the row: a token that has nothing to do with the
context is four spreads behind. Contexts are short, since in a random model of long ones attention is a mean of many
values, of which little is left.

As a job, `tokens` does this in float32 on some layers of a small model, where every token has to be right; where
two tokens of the prompts changed places, one in twenty of those generated were wrong. What is timed (`steps`) is looked
at in its own dtype, where rounding decides near ties, and in a mixture which experts compute: on a CPU, 32 layers in
bfloat16 brought no token further than 0.22 behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from benchmarks.gpu_parts.failures import FAILURES
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.models import random_model
from benchmarks.gpu_parts.rows import NOT_COMPARED
from selective_compile.bench.peers import greedy_without_end
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request import Request

MODEL, LAYERS = "qwen3-0.6b", 4
# Other requests come and go in nearly every step: each number of them up to all decodes together.
REQUESTS, GENERATED = 12, 32
LENGTHS = 5, 150  # of prompts, which end anywhere in a block


class Allowed(NamedTuple):
    """How far a token may be behind the likeliest one, in spreads of the row, and the part of tokens that must not be
    further."""

    behind: float
    part: float


ALLOWED = {torch.float32: Allowed(1e-3, 1.0), torch.bfloat16: Allowed(0.5, 0.98)}


def run(context: Context) -> None:
    model = random_model(MODEL, context.device, tiny=context.tiny, layers=LAYERS, dtype=torch.float32)
    config = EngineConfig(
        token_budget=context.job.token_budget,
        max_requests=REQUESTS,
        max_kv_tokens=room(),
        block_reuse=False,
        compile=False,  # another dtype is compiled anew, for longer than all the rest takes; `steps` are compiled
    )
    compare(context, f"{MODEL}, {LAYERS} layers, float32: tokens", model, Engine(model, config))


def room() -> int:
    """KV slots that all requests take together, with blocks of their own."""
    return REQUESTS * 2 * (LENGTHS[1] + GENERATED)


def compare(context: Context, name: str, model: PreTrainedModel, engine: Engine) -> None:
    """Tell what came of it, as a row of that name, unless there is one."""
    if name in context.job.done:
        return
    try:
        requests, captured = generate(engine)
        if any(len(request.tokens) != GENERATED for request in requests):
            context.fail(name, f"{[len(request.tokens) for request in requests]} tokens, each must get {GENERATED}")
            return
        behind = torch.cat([behind_best(model, request.prompt_ids, request.tokens) for request in requests])
    except FAILURES as error:
        context.failed(name, error, NOT_COMPARED)
        return
    _judge(context, name, behind, ALLOWED[model.dtype], captured)


def _judge(context: Context, name: str, behind: torch.Tensor, allowed: Allowed, captured: int) -> None:
    wrong = int((~(behind <= allowed.behind)).sum())  # also where it is NaN
    text = f"{wrong} of {len(behind)} are {allowed.behind} spreads behind, {captured} steps were captured"
    if wrong > (1 - allowed.part) * len(behind):
        context.fail(name, text)
    elif context.device.type == "cuda" and not captured:
        # Where steps are captured, others say nothing of those that are timed.
        context.fail(name, f"{NOT_COMPARED}{text}")
    else:
        figures = {"tokens": len(behind), "behind": wrong, "worst_behind": float(behind.max()), "captured": captured}
        context.tell(context.job.row(name, figures=figures, text=text))


def generate(engine: Engine) -> tuple[list[Request], int]:
    """Requests that have ended, and in how many steps the device replayed a graph."""
    draw, requests, captured = Random(0), [], 0
    for _ in range(REQUESTS):
        prompt = draw.choices(range(engine.vocab_size), k=draw.randint(*LENGTHS))
        requests.append(engine.submit(prompt, greedy_without_end(GENERATED)))
        engine.step()
        captured += engine.captured_step is not None
    while engine.step():
        captured += engine.captured_step is not None
    return requests, captured


@torch.no_grad()
def behind_best(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """For each token how much less its logit is than the largest, in standard deviations of its row; on the host."""
    if len(tokens) != GENERATED:
        raise ValueError(f"each request must get {GENERATED} tokens, got {len(tokens)}")
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    with sdpa_kernel(SDPBackend.MATH):  # others may round a float32 product to TF32
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=model.device)[:, None])[:, 0]
    return ((logits.amax(dim=-1) - chosen) / logits.std(dim=-1)).cpu()
