"""Whether a model computes something else of one token than of more: a trial, as no graph can tell.

Dynamo takes a number of tokens that it is to keep symbolic for two or more, so that a branch on one token leaves no
trace.  `generate` calls a model with one token for a prompt of one, and with a cache for each token after the first.
Nor does a graph tell what a call leaves in the model, as a count of calls, for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.model_call import CANNOT, logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import own_attributes, unchanged
from selective_compile.passes import Refusal
from selective_compile.rounding import computed_in, rounded_as, tolerance
from selective_compile.sequential_program import OneRequest, stepped, why_not_run
from selective_compile.skeleton import Forward, skeleton, structure_of
from selective_compile.unused_cache import leaves_cache_unused
from selective_compile.where_refused import begin_of

TOKENS, PROMPT = 7, 4
# Of a longer request, where steps of `generate` may depart from the forward with what it counts or keeps of a few dozen
# tokens: as many as a trial of isolated modules takes.
LONGER, STEPS = 66, 3
TOKEN_IDS = 8  # there are as many in any vocabulary
Pair = tuple[Tensor, Tensor]  # of a token by itself, of it among others
# Logits [count, V] of ids [S], of the tokens from the last of a prompt of so many on, as they are to be.
Wanted = Callable[[Tensor, int], Tensor]
Rows = Callable[[Tensor], Tensor]  # logits [S, V] of ids [S], given all at once


@torch.no_grad()
def one_token_refusal(
    model: nn.Module,
    isolated: Collection[str] = (),
    *,
    prefix: int = 0,
    longest: int | None = None,
    rows: Rows | None = None,
    wanted: Wanted | None = None,
    longer: int = LONGER,
) -> Refusal | None:
    """What to say of ``model`` if its logits of a token that it is given by itself are others, or those of a call after
    another; None if the same.

    Args:
        isolated: paths of modules of which each request has its own, with what calls leave in them.
        prefix: so many first tokens see one another, so that one by itself is another: then only calls after another
            are tried here, and `prefix_refusal` tries the others.
        longest: tokens that a request can have at most, None: as many as it likes.
        rows: what there is for tokens among others, None: what the model gives of them.
        wanted: what steps of `generate` are to give, None: what ``rows`` gives of all tokens at once.
        longer: tokens of the longer request.
    """
    given = rows or partial(logits, model)
    wanted = wanted or (lambda ids, prompt: given(ids)[prompt - 1 :])
    ids = drawn(model, vocabulary_of(model), TOKENS, seed=0)[:longest]
    with unchanged(model):
        if departs(model, pairs(lambda: called_again(model, ids, isolated))):
            return refusal(model, "", "tokens once it was called", "when it is called first", "state of earlier calls")
        if prefix:
            return None
        twos = ids.split(2)[:-1]
        if departs(model, pairs(lambda: [(logits(model, two[:1])[0], given(two)[0]) for two in twos])):
            return refusal(model, departing_module(model, ids[:2]), "a prompt of one token")
        if rows and departs(model, pairs(lambda: of_last_alone(model, ids, given))):
            return refusal(model, "", "the last token of a prompt")
        if leaves_cache_unused(model):  # nobody steps it so
            return None
        if departs_in_generate(model, ids, PROMPT, wanted) or departs_later(model, longest, wanted, longer):
            return refusal(model, "", "one token and a cache, as in steps of generate")
    return None


def drawn(model: nn.Module, vocabulary: int, count: int, *, seed: int) -> Tensor:
    """[count] token ids, where the model is."""
    found = torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed), device="cpu")
    return found.to(device_of(model))


def departs_later(model: nn.Module, longest: int | None, wanted: Wanted, longer: int) -> bool:
    """Whether steps behind a longer prompt depart in most of them, and of other tokens, too: among so many, one of two
    scores that are nearly equal may be the larger by rounding alone, where a router or an indexer chooses by them."""
    count = longer if longest is None else min(longer, longest)
    if count <= TOKENS:
        return False
    trials = (drawn(model, vocabulary_of(model), count, seed=seed) for seed in (1, 2))
    return all(departs_in_generate(model, ids, count - STEPS, wanted, in_most=True) for ids in trials)


def vocabulary_of(model: Any) -> int:
    """How many token ids there are, or as many as any vocabulary has."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except CANNOT:
        return TOKEN_IDS


def called_again(model: nn.Module, ids: Tensor, isolated: Collection[str]) -> list[Pair]:
    """Logits of two calls with the same tokens, and a third: what a call leaves in the model is there in the next, but
    for what it leaves in modules that are ``isolated``."""
    call, arguments = logits_call(model, ids[None])
    found = []
    with own_attributes(model, {}):
        for _ in range(3):
            with ExitStack() as own:
                for path in isolated:
                    own.enter_context(own_attributes(model.get_submodule(path), {}))
                found.append(call(*arguments)[0].clone())
    return list(zip(found[1:], found, strict=False))


def of_last_alone(model: nn.Module, ids: Tensor, rows: Rows) -> list[Pair]:
    """What the model gives of the last token of each prompt that begins as ``ids``, and its row among those of all."""
    return list(zip((logits(model, ids[:count])[-1] for count in range(1, len(ids) + 1)), rows(ids), strict=True))


def departs_in_generate(model: nn.Module, ids: Tensor, prompt: int, wanted: Wanted, *, in_most: bool = False) -> bool:
    """Whether a token that `generate` steps by itself behind so many, with a cache, gives other logits than those that
    are wanted."""
    if why_not_run(model) or len(ids) <= prompt:
        return False

    def found() -> list[Pair]:
        stepped_alone = by_generate(model, ids, [prompt] + [1] * (len(ids) - prompt))
        return list(zip(stepped_alone, wanted(ids, prompt), strict=True))

    return departs(model, pairs(found), in_most=in_most)


def pairs(run: Callable[[], list[Pair]]) -> list[Pair]:
    """What ``run`` gives; none of a model that cannot be called so, as those that need more tokens."""
    try:
        return run()
    except CANNOT:
        return []


def departs(model: nn.Module, found: list[Pair], *, in_most: bool = False) -> bool:
    """Whether any pair differs; most of them, where ``model`` does not compute in float32 and rounding decides whom a
    router chooses."""
    if not found:
        return False
    differences = torch.stack([((a.float() - b.float()).abs().max() / b.float().std()) for a, b in found])
    dtype, device = computed_in(model, found[0][0]), found[0][0].device
    any_counts = rounded_as(dtype, device) in (torch.float32, torch.float64) and not in_most
    worst = differences.max() if any_counts else differences.median()
    return bool(worst > tolerance(dtype, device))


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """``[S, V]`` of ``ids`` ``[S]`` without a cache, on attributes as they are at first."""
    call, arguments = logits_call(model, ids[None])
    with own_attributes(model, {}):
        return call(*arguments)[0]


def by_generate(model: Any, ids: Tensor, counts: list[int]) -> list[Tensor]:
    """``[V]`` of the last token of each step of so many tokens, as `generate` would run them."""
    one = OneRequest(tokens=ids[None, :0])
    found = []
    with own_attributes(model, {}):
        for part in ids[: sum(counts)].split(counts):
            one.tokens = torch.cat([one.tokens, part[None]], dim=1)
            found.append(stepped(model, one))
    return found


def departing_module(model: nn.Module, two: Tensor) -> str:
    """The first module to return something else for the first of ``two`` tokens if it is alone; "" if it is unclear."""
    alone, among = outputs(model, two[:1]), outputs(model, two)
    for path, single in alone:
        others = [other for place, other in among if place == path and other.dim() == single.dim() > 1]
        if single.dim() > 1 and single.shape[1] == 1 and others and others[0].shape[1] == 2 and path:
            if departs(model, [(single, others[0][:, :1])]):
                return path
    return ""


def outputs(model: nn.Module, ids: Tensor) -> list[tuple[str, Tensor]]:
    """The first tensor that each module returns, in the order in which they do: inner ones before those around."""
    found: list[tuple[str, Tensor]] = []

    def recording(path: str) -> Callable[[nn.Module], Forward]:
        def of(module: nn.Module) -> Forward:
            own = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                tensors: list[Tensor] = []
                structure_of(result, tensors)
                found.extend((path, tensor) for tensor in tensors[:1])
                return result

            return forward

        return of

    paths = [path for path, module in model.named_modules() if path and not isinstance(module, nn.ModuleList)]
    logits(skeleton(model, {path: recording(path) for path in paths}), ids)
    return found


def refusal(
    model: nn.Module,
    path: str,
    what: str,
    than: str = "of the same token among others",
    operator: str = "branch on one token",
) -> Refusal:
    return Refusal(
        node="tokens",
        operator=operator,
        reason=f"the model computes something else of {what} than {than}",
        source_line=begin_of(type(model.get_submodule(path)).forward),
        module=path,
    )
