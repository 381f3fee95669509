"""Several engines behind one `submit`: which of them serves a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

from selective_compile.forks import lock_of_any_process
from selective_compile.runtime.block_names import extend_names
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.prompt import check_request_id, token_ids
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.stats import EngineStats

Routing = Literal["round_robin", "least_loaded", "prefix_aware"]

# Blocks of prompts of which it is remembered which engine has seen them.
REMEMBERED = 2**16
# An engine that has so many requests more than another does not get one for a prefix's sake.
IMBALANCE = 8


class RequestProcessor:
    """Gives each request to one of several engines, each with KV pools of its own, on one device or on several.

    An id is unfinished in at most one of them. Nothing else is shared: a request's tokens are those that its engine
    gives, which are the same in all engines of one model and one seed, since a made-up id is made up here.
    """

    def __init__(self, engines: Sequence[Engine], *, routing: Routing = "prefix_aware") -> None:
        """
        Args:
            engines: of the same model; anybody else who submits to them takes care of the ids himself.
            routing: "round_robin": one after the other; "least_loaded": the one with the fewest tokens of unfinished
                requests; "prefix_aware": the one that has seen the most of the prompt, where it reuses blocks, unless
                it has a lot more to do than the others.

        Raises:
            ValueError: there is no engine, or one twice, or what is none; or their vocabularies or block sizes differ.
        """
        wrong = (
            [each for each in engines if not isinstance(each, Engine)] if isinstance(engines, Sequence) else [engines]
        )
        if wrong:
            raise ValueError(f"engines must be a list of Engines, got {type(wrong[0]).__name__}")
        if not engines or len(set(map(id, engines))) != len(engines):
            raise ValueError(f"engines must be at least one, and each a different one, got {list(engines)}")
        if not isinstance(routing, str) or routing not in get_args(Routing):
            raise ValueError(f"routing must be one of {', '.join(map(repr, get_args(Routing)))}, got {routing!r}")
        kinds = {(engine.vocab_size, engine.config.block_size, engine.config.seed) for engine in engines}
        if len(kinds) > 1:
            raise ValueError(f"engines must have one vocabulary size, block size and seed, got {sorted(kinds)}")
        self.engines = tuple(engines)
        self.routing = routing
        self._lock = lock_of_any_process()
        self._open: dict[RequestId, tuple[int, Request]] = {}
        self._submitted = 0
        self._seen = [OrderedDict[bytes, None]() for _ in engines]

    def submit(
        self,
        prompt_ids: Any,
        generation_config: Any = None,
        request_id: RequestId | None = None,
        *,
        cache_salt: str | None = None,
        **options: Any,
    ) -> Request:
        """As `Engine.submit`, whose handle it returns.

        Raises:
            ValueError: anything about it is wrong, or the id is that of an unfinished request of any of the engines.
        """
        prompt = token_ids(prompt_ids, self.engines[0].vocab_size)
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt must be a string or None, got {cache_salt!r}")
        names: list[bytes] = []
        if self.routing == "prefix_aware":
            size = self.engines[0].config.block_size
            extend_names(names, prompt, cache_salt, len(prompt) // size, size)
        with self._lock:
            self._forget_ended()
            chosen_id = self._choose_id(request_id)
            place = self._place_of(names)
            request = self.engines[place].submit(prompt, generation_config, chosen_id, cache_salt=cache_salt, **options)
            taken = [sample.request_id for sample in request.samples if sample.request_id in self._open]
            if taken:  # of another engine: which ids samples have is known only now
                for sample in request.samples:
                    sample.cancel()
                raise ValueError(f"request_id must not be that of an unfinished request, got {taken[0]!r}")
            self._submitted += 1
            self._open |= {sample.request_id: (place, sample) for sample in request.samples}
            self._remember(place, names)
        return request

    def step(self) -> bool:
        """One iteration of each engine that has work; False: none had. Raises what `Engine.step` raises."""
        worked = [engine.step() for engine in self.engines]
        return any(worked)

    @contextmanager
    def running(self) -> Iterator[RequestProcessor]:
        """Run each engine in a background thread of its own."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.running())
            yield self

    def engine_of(self, request: Request) -> Engine:
        """The one that an unfinished request was given to."""
        with self._lock:
            place, _ = self._open[request.request_id]
        return self.engines[place]

    def stats(self) -> tuple[EngineStats, ...]:
        return tuple(engine.stats() for engine in self.engines)

    def __repr__(self) -> str:
        stats = self.stats()
        running, waiting = sum(each.running for each in stats), sum(each.waiting for each in stats)
        return f"RequestProcessor({len(self.engines)} engines, {self.routing!r}, {running} running, {waiting} waiting)"

    def _choose_id(self, request_id: RequestId | None) -> RequestId:
        if request_id is None:
            number = self._submitted
            while (made_up := f"routed-{number}") in self._open:  # an engine calls its own requests otherwise
                number += 1
            return made_up
        if (chosen := check_request_id(request_id)) in self._open:
            raise ValueError(f"request_id must not be that of an unfinished request, got {chosen!r}")
        return chosen

    def _forget_ended(self) -> None:
        for request_id, (_, request) in list(self._open.items()):
            if request.finished:
                del self._open[request_id]

    def _place_of(self, names: Sequence[bytes]) -> int:
        if self.routing == "round_robin":
            return self._submitted % len(self.engines)
        loads = self._loads()
        least = min(range(len(loads)), key=lambda place: (loads[place], place))
        if self.routing == "least_loaded":
            return least
        counts = self._counts()
        known = [self._known(place, names) for place in range(len(self.engines))]
        fewest = min(counts)
        allowed = [place for place in range(len(counts)) if counts[place] <= fewest + IMBALANCE]
        best = max(allowed, key=lambda place: (known[place], -loads[place], -place))
        return best if known[best] else least

    def _loads(self) -> list[int]:
        """Tokens that unfinished requests still need computed at most, by engine."""
        loads = [0] * len(self.engines)
        for place, request in self._open.values():
            loads[place] += request.state.final_length - request.state.computed
        return loads

    def _counts(self) -> list[int]:
        counts = [0] * len(self.engines)
        for place, _ in self._open.values():
            counts[place] += 1
        return counts

    def _known(self, place: int, names: Sequence[bytes]) -> int:
        seen = self._seen[place]
        return next((count for count, name in enumerate(names) if name not in seen), len(names))

    def _remember(self, place: int, names: Sequence[bytes]) -> None:
        """What an engine has seen may have gone from its pool: a wrong guess costs time and no token."""
        seen = self._seen[place]
        for name in reversed(names):  # the end of a prompt is forgotten before its beginning
            seen[name] = None
            seen.move_to_end(name)
        while len(seen) > REMEMBERED:
            seen.popitem(last=False)
