"""A step program in which some modules run by themselves, for one request after another."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selective_compile.captured import Captured
from selective_compile.isolated_cache import Caches, put_at
from selective_compile.isolated_op import running
from selective_compile.module_program import ModuleProgram
from selective_compile.module_state import Place, State, own_attributes
from selective_compile.options import EngineConfig
from selective_compile.passes import Refusal, Rewrite
from selective_compile.passes.isolated_call import Argument, IsolatedCall
from selective_compile.skeleton import others_in, rebuilt, structure_of
from selective_compile.step import GENERATED, StepInputs
from selective_compile.step_program import StepProgram

# What a module sees of a request in a step: the step's tokens, with the request's own cache; these if it is one token,
# else all from the first on, with a new cache; or all from the first on, and no cache.  The first two are for modules
# that are given a cache.
Mode = Literal["new tokens", "one new token", "all tokens"]
# Requests of at most so many tokens may be computed in parts of any size: `isolation_trial` has tried it.
TRIED = 64
MODES: tuple[Mode, ...] = ("new tokens", "one new token", "all tokens")


class Rows:
    """What one argument was for all tokens of a request so far: grows by doubling."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None  # [capacity, ...]
        self.count = 0

    def extended(self, rows: Tensor) -> Tensor:
        """All rows ``[count, ...]`` once ``rows`` have been added."""
        needed = self.count + len(rows)
        if self._kept is None or needed > len(self._kept):
            grown = rows.new_empty(max(needed, 2 * self.count), *rows.shape[1:])
            if self._kept is not None:
                grown[: self.count] = self._kept[: self.count]
            self._kept = grown
        self._kept[self.count : needed] = rows
        self.count = needed
        return self._kept[:needed]


@dataclass(kw_only=True)
class Kept:
    """What is kept of one request: rows by call and argument, its cache, and by call what a module set of its own."""

    rows: dict[tuple[int, int], Rows] = field(default_factory=dict)
    cache: Any = None
    attributes: dict[int, State] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Share:
    """Rows ``first`` to ``end`` of the step, from ``position`` on in their request."""

    request: Hashable
    kept: Kept
    first: int
    end: int
    position: int
    answers: dict[int, list[Tensor]] = field(default_factory=dict)  # by call: the tensors that it gave

    @property
    def count(self) -> int:
        return self.end - self.first

    @property
    def length(self) -> int:
        return self.position + self.count


class Wholes:
    """Values made of a request's length alone, each evaluated once in a step."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Tensor] = {}

    def __call__(self, argument: Argument, tokens: int) -> Tensor:
        assert argument.whole is not None
        key = (id(argument.whole), tokens)
        if key not in self._found:
            self._found[key] = argument.whole(tokens)
        return self._found[key]


class IsolatedProgram(ModuleProgram):
    """As `ModuleProgram`, with modules called for each request by itself; ``mode`` says on what.

    ``isolated`` has the modules' paths, and why they are; ``written`` are buffers that each call writes, of which each
    request has its own.  One that is given no cache sees all tokens of its request up to the last of the step: exact if
    what it gives for a token does not depend on the tokens behind it, and slow.  One that is given a cache sees, of a
    request of more than `TRIED` tokens, what `generate` would show it.
    """

    keeps_requests = True
    cut_up_to = TRIED
    forks_requests = False  # what modules leave in their caches and attributes is theirs

    def __init__(
        self,
        model: nn.Module,
        rewritten: Rewrite,
        config: EngineConfig,
        *,
        max_positions: int | None,
        isolated: Mapping[str, Refusal],
        caches: Caches | None,
        written: Collection[Place] = (),
        mode: Mode,
        captured: Captured | None = None,
    ) -> None:
        super().__init__(model, rewritten, config, max_positions=max_positions, captured=captured)
        self.isolated, self.mode = isolated, mode
        self.counts_padding = True  # what a module makes of zeros in a mask, nobody knows
        self._caches = caches
        self._written = {
            (copied, kind, name) for own, copied in self._pairs for module, kind, name in written if module is own
        }
        self._modes = [mode_of(call, mode, caches) for call in self.calls]
        self._requests: dict[Hashable, Kept] = {}
        self._failed: dict[Hashable, Exception] = {}

    def take_failed(self) -> dict[Hashable, Exception]:
        """The requests of which a module has raised since this was called last, and what; their rows are of no use."""
        found, self._failed = self._failed, {}
        return found

    def forget(self, request: Hashable) -> None:
        """Let go of all that is kept of a request that has left, if it is in a step that runs, when that has run."""
        self._requests.pop(request, None)

    def _logits(
        self,
        inputs: StepInputs,
        pools: Sequence[tuple[Tensor, Tensor]],
        states: Sequence[Tensor],
        scales: Sequence[Tensor],
    ) -> Tensor:
        with self._lock:
            shares = list(self._shares(inputs))
            with running(partial(self._run_call, shares, Wholes())):
                return StepProgram._logits(self, inputs, pools, states, scales)

    def _shares(self, inputs: StepInputs) -> Iterator[Share]:
        bounds = inputs.cu_seqlens_q.tolist()
        for request, first, end in zip(inputs.requests, bounds, bounds[1:], strict=False):
            if first == end:
                continue
            position = int(inputs.positions[first]) % GENERATED  # without marks
            kept = self._requests.get(request)
            if position == 0:
                kept = self._requests[request] = Kept()
            elif kept is None:  # cancelled since the step was put together: nobody reads what it gives
                position, kept = 0, Kept()
            assert kept.tokens == position, "a request goes on where it was"
            if self._caches is not None and (position == 0 or (end - first > 1 and self.mode == "one new token")):
                kept.cache, kept.attributes = self._caches.new(), {}
            kept.tokens = position + end - first
            yield Share(request=request, kept=kept, first=first, end=end, position=position)

    def _run_call(self, shares: list[Share], wholes: Wholes, number: int, values: list[Tensor]) -> list[Tensor]:
        """For call ``number``, its results over all rows of the step; ``values`` are those that the graph computed."""
        call = self.calls[number]
        if call.token_wise:
            return self._called_once(number, values)
        rows = next(argument for argument in call.arguments if argument.kind == "rows")
        total = values[rows.value].shape[rows.dim]
        shapes = [(dtype, [n if isinstance(n, int) else total for n in sizes]) for dtype, sizes in call.sizes]
        results = [torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device) for dtype, shape in shapes]
        for share in shares:
            if share.request in self._failed:
                continue
            try:
                answer = share.answers[number] = self._answer(share, wholes, number, values)
            except Exception as error:  # noqa: BLE001 - a module raises anything, of this request alone
                self._failed[share.request] = error
                continue
            for result, dim, index in zip(results, call.token_dims, call.results, strict=True):
                new = answer[index]
                last = new.narrow(dim, new.shape[dim] - share.count, share.count)
                result.narrow(dim, share.first, share.count).copy_(last)
        return results

    def _answer(self, share: Share, wholes: Wholes, number: int, values: list[Tensor]) -> list[Tensor]:
        """The tensors that the module returns for one request."""
        call, module, mode = self.calls[number], self._modules[number], self._modes[number]
        goes_on = share.position > 0 and (mode == "new tokens" or (mode == "one new token" and share.count == 1))
        tensors = [
            self._argument(share, wholes, (number, place), argument, values, goes_on)
            for place, argument in enumerate(call.arguments)
        ]
        args, kwargs = rebuilt(call.structure, tensors)
        if mode != "all tokens":
            assert self._caches is not None
            self._caches.calls[call.module].put(args, kwargs, share.kept.cache)
        elif others_in(call.structure):  # the model hands out a cache even if it is told to use none
            assert self._caches is not None
            put_at(self._caches.calls[call.module].cache, self._caches.new(), args, kwargs)
        found: list[Tensor] = []
        with own_attributes(module, share.kept.attributes.get(number, {}), self._written) as left:
            structure_of(module(*args, **kwargs), found)
        if mode != "all tokens":
            share.kept.attributes[number] = left
        return found

    def _argument(
        self,
        share: Share,
        wholes: Wholes,
        place: tuple[int, int],
        argument: Argument,
        values: list[Tensor],
        goes_on: bool,
    ) -> Tensor:
        if argument.kind == "constant":
            return values[argument.value]
        if argument.kind == "handed":
            return share.answers[argument.call][argument.value]
        if argument.kind == "whole":
            value = wholes(argument, share.length)
            return value[..., share.position :, :] if goes_on and argument.is_pair else value
        rows = values[argument.value].narrow(argument.dim, share.first, share.count).movedim(argument.dim, 0)
        if self._modes[place[0]] != "new tokens":
            every = share.kept.rows.setdefault(place, Rows()).extended(rows)
            rows = rows if goes_on else every
        return rows.movedim(0, argument.dim).clone()  # the module may write to it


def mode_of(call: IsolatedCall, mode: Mode, caches: Caches | None) -> Mode:
    """``mode`` for a module that is given a cache, unless the cache drops keys for which its mask has columns."""
    if caches is None or call.module not in caches.calls:
        return "all tokens"
    masked = any(argument.is_pair for argument in call.arguments)
    return "all tokens" if masked and any(getattr(caches.unused, "is_sliding", ())) else mode
