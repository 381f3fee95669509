"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn
from transformers import GenerationConfig

from selective_compile.backend import Program, report_of
from selective_compile.cores import IntraOpThreads
from selective_compile.model_facts import uncompiled
from selective_compile.module_state import itself
from selective_compile.options import EngineConfig
from selective_compile.progress import on_stderr, silent
from selective_compile.report import Report
from selective_compile.runtime.background import BackgroundThread, weakly
from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.drafting import Drafting
from selective_compile.runtime.engine_parts import EngineParts
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.generation_fields import FIELDS
from selective_compile.runtime.outbox import Outbox
from selective_compile.runtime.prompt import token_ids
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.roster import Roster
from selective_compile.runtime.samples import Asked
from selective_compile.runtime.scheduler import Scheduler
from selective_compile.runtime.state_guard import StateGuard
from selective_compile.runtime.stats import EngineStats, StepObserver
from selective_compile.runtime.step_lock import StepLock
from selective_compile.runtime.step_log import StepLog
from selective_compile.runtime.step_loop import StepError, StepLoop
from selective_compile.runtime.submitted_prompt import Submission

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests on one model, choosing anew at each step which of them run.

    ::

        engine = Engine(model, EngineConfig(token_budget=256))
        for token in engine.submit(prompt_ids, max_new_tokens=64):  # reading runs the engine's steps,
            ...
        with engine.running():  # unless a thread does
            request = engine.submit(prompt_ids)

    Every method may be called from any thread; submitting, cancelling and `stats` never wait for the model.

    Attributes:
        longest: the most tokens that a request can come to compute.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig | None = None,
        *,
        program: Program | None = None,
        observers: Sequence[StepObserver] = (),
        clock: Callable[[], float] = time.perf_counter,
        stream: DeviceStream | None = None,
    ) -> None:
        """Compile the model and allocate the KV pools.

        Args:
            model: a causal decoder; it is left as it is, its weights are shared.
            config: None takes the defaults.
            program: the model already compiled, so that several engines can share it.
            observers: called after each step, in the thread that ran it. One that raises is logged and called no
                more.
            clock: seconds since any moment; what is decided by time goes by it.
            stream: in what order, and when, the model's device does what it is given; None: as it does.

        Raises:
            ValueError: the model cannot be rewritten, or the configuration does not go with it.
            OSError: `config.record` is no place to write to.
        """
        if config is not None and not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig or None, got {config!r}")
        self.config = config if config is not None else EngineConfig()
        with torch.inference_mode(False):  # what is kept is to be written to within and without
            parts = EngineParts.of(uncompiled(model), self.config, program, Engine, stream)
        self._model_name = type(uncompiled(model)).__name__
        self.longest = parts.longest
        self._runner, self._scheduler = parts.runner, parts.scheduler
        self._intake, self._recording = parts.intake, parts.recording
        self._program = self._runner.program
        self._log = StepLog(observers, clock)
        # Three locks: `_stepping` is held for a step, the model's run included, so that there is one at a time;
        # `_submitting` while a request's options are read, so that its id stays free; `_guard` for moments, over all
        # state. It is notified when there is work.
        self._guard = StateGuard()
        # A log tells of requests that each compute their own prompt. Drafts change no token; but how long they are
        # goes by measured times in a way that a log does not tell.
        recorded = self.config.record is not None
        self._drafting = Drafting(
            self._scheduler,
            parts.assistants,
            self._guard,
            vocab_size=self.vocab_size,
            allowed=self._program.rewinds and not recorded,
        )
        self._outbox = Outbox(threaded=self.config.overlap)
        forks = self._program.forks_requests and not recorded
        self._roster = Roster(self._scheduler, self._runner, drafting=self._drafting, log=self._log, forks=forks)
        self._requests = self._roster.requests
        self._steps = StepLoop(
            parts,
            guard=self._guard,
            roster=self._roster,
            drafting=self._drafting,
            outbox=self._outbox,
            log=self._log,
        )
        self._submitting = Lock()
        self._stepping = StepLock(self._submitting, self._guard)
        self._threads = IntraOpThreads(self.config.threads)
        self._threads.warn()
        # A step computes in the dtypes of what was traced, whatever the caller has set meanwhile.
        self._own_dtypes = torch.autocast(self._program.device.type, enabled=False)
        self._background = BackgroundThread(
            guard=self._guard,
            has_work=partial(has_work, self._scheduler),
            step=weakly(self.drive),
            on_stop=weakly(self._wake_readers),
        )

    def submit(
        self,
        prompt_ids: Any,
        generation_config: GenerationConfig | None = None,
        request_id: RequestId | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        user: RequestId | None = None,
        cache_salt: str | None = None,
        **options: Any,
    ) -> Request:
        """Queue a request; it enters a step as soon as there is room.

        Args:
            prompt_ids: its token ids: a sequence, an array or a tensor of one dimension.
            generation_config: as for `model.generate`; what it leaves open comes from
                `model.generation_config`.
            request_id: a string or an integer that no unfinished request has; None: one is made up.
            priority: for the waiting order "priority": as if it had come 10 seconds earlier for each 1.
            deadline: seconds from now in which it must end, for the waiting order "deadline". When it comes first
                and cannot end in time, by the time that steps have taken so far, it ends with an error at once.
            user: whose request it is, for the waiting order "fair"; None is a user too.
            cache_salt: the request shares computed blocks only with requests of the same salt, so that nobody
                else can find out, by how soon the first token comes, that a prompt was here before.
            options: single fields of a GenerationConfig, which come first, where None turns off what the
                configurations set; `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`,
                `negative_prompt_ids`, `negative_prompt_attention_mask` and `tokenizer` as for `model.generate`,
                for this request alone; `json_schema`, `regex` or `grammar` (of Lark), which its text must follow,
                with `tokenizer`; `seed`; and what to keep of each step, `logprobs`, `processed_logprobs` and
                `top_logprobs`, and of the prompt, `prompt_logprobs` and `prompt_logits`. With `num_return_sequences`
                above 1 the request is the first of `samples`, each of them a request; they have the seeds that follow
                its own, and ids such as "a/1". With `num_beams` above 1 all tokens come at the end.

        Raises:
            ValueError: anything about it is wrong; other requests are not affected.
        """
        asked = self._intake.samples(generation_config, options)
        terms: dict[str, Any] = {"priority": priority, "deadline": deadline, "user": user, "cache_salt": cache_salt}
        return self.submit_samples(prompt_ids, asked, request_id, **terms)[0]

    def submit_samples(
        self,
        prompt_ids: Any,
        asked: Sequence[Asked],
        request_id: RequestId | None = None,
        *,
        rows_from: int | None = None,
        shown: Any = None,
        id_offset: int = 0,
        **terms: Any,
    ) -> tuple[Request, ...]:
        """Queue several requests of one prompt, which is computed once for all where that can be; else as `submit`.

        Args:
            asked: of each of them.
            request_id: of the first; the others have a number behind it.
            rows_from: where log probabilities of the prompt are asked for, the token whose next is the first of them;
                what is behind it counts as generated; None: the first, of a prompt alone.
            shown: token ids, also none, that stand for the prompt where processors, criteria and beams look at it;
                the prompt itself may then have ids that are no tokens, as far as the program has a place for them.
            id_offset: what is added to the ids of generated tokens where the program gets them; others see them as
                they are.
            terms: those of `submit`, the same for all.
        """
        terms = {"priority": 0, "deadline": None, "user": None, "cache_salt": None, **terms}
        submission = self._intake.prompt(prompt_ids, arrival=self._log.now(), shown=shown, id_offset=id_offset, **terms)
        entered: tuple[Request, ...] = ()
        try:
            with self._submitting:
                with self._guard:
                    ids = self._requests.choose_ids(request_id, len(asked))
                pairs = zip(ids, asked, strict=True)
                every = [self._intake.params(submission, each, one.config, one.options) for each, one in pairs]
                with self._guard:
                    entered = self._entered(submission, ids, every, asked, rows_from)
        except BaseException:  # a signal's, which has waited until they were in: nobody has them to cancel them
            for request in entered:
                self.cancel(request)
            raise
        return entered

    def _entered(
        self,
        submission: Submission,
        ids: Sequence[RequestId],
        every: Sequence[GenerationParams],
        asked: Sequence[Asked],
        rows_from: int | None,
    ) -> tuple[Request, ...]:
        """The requests of `submit_samples`, which wait from now on; under the guard."""
        requests = []
        for chosen_id, params, one in zip(ids, every, asked, strict=True):
            state = submission.state(chosen_id, self._requests.next_number, params)
            if any(each.keeps_prompt for each in every):
                state.rows_from = rows_from or 0
                if rows_from is not None:  # behind it is what was generated, and is computed so
                    state.generated_from = rows_from + 1
            requests.append(Request(state, params, self))
            self._requests.add(requests[-1])
            self._recording.submitted(state, submission, params, one.config, one.options)
        self._roster.enter(requests, device=self._program.device)
        self._guard.notify_all()
        return tuple(requests)

    def score(self, prompt_ids: Any, continuation_ids: Any) -> tuple[float, ...]:
        """The log probability of each token of a continuation, given the prompt and the tokens before it.

        As `logprobs` of a request that had generated these tokens; waits as `Request.result` does.

        Raises:
            ValueError: as `submit`.
            RuntimeError: a step failed.
        """
        prompt = token_ids(prompt_ids, self._program.vocab_size)
        continuation = token_ids(continuation_ids, self._program.vocab_size, name="continuation_ids")
        # Of the model's own configuration, nothing: stop strings, say, would ask for a tokenizer.
        asked_for = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "prompt_logprobs": True}
        options = {**dict.fromkeys(FIELDS), **asked_for}
        asked = Asked(config=GenerationConfig(), options=options)
        (request,) = self.submit_samples(prompt + continuation, [asked], rows_from=len(prompt) - 1)
        result = request.result()
        if result.prompt_logprobs is None or len(result.prompt_logprobs) != len(continuation):
            raise RuntimeError(f"scoring ended with {result.finish_reason!r}: {result.error}")
        return result.prompt_logprobs

    def step(self) -> bool:
        """One iteration: schedule, assemble, run, sample, publish. False: there was nothing to do.

        With `EngineConfig.overlap` the requests get this step's tokens while the next one runs, unless nothing is left
        to do: see `hand_out`. With `EngineConfig.async_scheduling` this call gives a step to the device, and publishes
        the one before.

        Raises:
            RuntimeError: a step calls this.
            StepError: the step failed. All running requests have ended with "error"; waiting ones go on, unless
                none was running: then no step would get further, and they have ended too.
        """
        with self._stepping.of_one_step(), self._guard.listening(), self._threads, self._own_dtypes:
            return self._steps.step()

    def warm_up(self, *, progress: bool = True) -> None:
        """Before requests come, compile what compiles when it first runs, and capture all steps that are replayed as
        graphs (`EngineStats.captured_max`), so that no request waits for that.

        Steps of nobody's tokens: no request, block or prefix is left of them. Weights that are put elsewhere in memory
        are another reason to call it. What runs one request after another is not run.

        Args:
            progress: show a bar on standard error, if that is a terminal.

        Raises:
            RuntimeError: a step calls this.
            StepError: steps were on the device, and one of them failed.
        """
        stages = on_stderr() if progress else silent
        with self._stepping.of_one_step(), self._guard.listening(), self._threads, self._own_dtypes:
            with torch.inference_mode(False):
                self._steps.warm_up(stages)

    def __repr__(self) -> str:
        stats = self.stats()
        return f"Engine({self._model_name}, {stats.running} running, {stats.waiting} waiting)"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("an Engine must not be copied or pickled: make one of the model, in each process")

    def cancel(self, request: Request) -> None:
        """End a request with "cancelled" and free its blocks; without effect on one that has finished.

        Raises:
            ValueError: it is no request, or another engine's.
        """
        if not isinstance(request, Request) or not request.is_of(self):
            raise ValueError(f"request must be one of this engine, got {request!r}")
        with self._guard:
            self._outbox.flush()
            if not request.finished:
                self._recording.cancelled(request.state)
                self._roster.leave(request)
                request.finish("cancelled")

    def cancel_all(self) -> None:
        """`cancel` every request that is unfinished, as where a server is to end: who reads one is let go, and does not
        go on to compute it when no thread does."""
        with self._guard:
            requests = list(self._requests)
        for request in requests:
            self.cancel(request)

    def hand_out(self) -> None:
        """Wait until the tokens of all steps so far are with their requests, as without `EngineConfig.overlap`; with
        `EngineConfig.async_scheduling`, of all but the last one."""
        with self._guard:
            self._outbox.flush()

    @contextmanager
    def running(self) -> Iterator[Engine]:
        """Run the steps in a background thread, which sleeps while there is nothing to do.

        At the end the thread stops after the step it is in. Requests that have not finished by then stay, and
        go on as soon as someone calls `step` or reads from them.

        Raises:
            RuntimeError: a background thread runs already, or a step calls this.
        """
        self.check_outside_step()
        with self._background.running():
            yield self

    @property
    def captured_step(self) -> Callable[[], object] | None:
        """The last step alone, if the device replayed a graph for it: a call replays that once more, without what the
        host does for a step. None: it was launched one by one, or there was none.

        To time it. It computes with the tokens that the step itself chose, and writes over what that wrote, so that
        the running requests' tokens are of no use from then on.
        """
        return self._runner.captured_step

    @property
    def counts_padding(self) -> bool:
        """Whether padding between tokens would count to the model itself, as it does not here: in a window, say."""
        return self._program.counts_padding

    @property
    def prefix(self) -> int:
        """How many of a request's first tokens see one another."""
        return self._program.prefix

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in the pools of all attention calls together."""
        return self._runner.kv_bytes_per_token

    @property
    def began(self) -> float:
        """When the engine was made, on its clock; the times in records count from there."""
        return self._log.began

    @property
    def driven(self) -> bool:
        """Whether a background thread runs the steps."""
        return self._background.alive

    @property
    def lost(self) -> bool:
        """Whether it is of no use in this process, which was forked within one of its steps."""
        return self._stepping.lost

    def drive(self) -> None:
        """Run a step for those who learn of its failure from their requests."""
        try:
            self.step()
        except StepError:
            logger.exception("a step failed; its requests have ended with an error")

    def check_outside_step(self) -> None:
        """Raises RuntimeError in the thread of a step, which its processor, criterion or observer runs in: what waits
        for another step there would wait for ever.
        """
        self._stepping.check()

    def drop_computed(self, *, if_idle: bool = False) -> None:
        """Drop all keys and values, as a change of the weights does; requests compute again what they need.  Int8
        numbers of weights and scales of keys and values are made anew, too, in the next step, for all engines that
        share the program.

        Needed only after a change that PyTorch does not count, such as one through `.data`.

        Args:
            if_idle: not if there are unfinished requests.
        """
        with self._stepping.of_one_step(), self._guard.listening():
            self._steps.land()
            with self._guard:
                if if_idle and self._requests:
                    return
                self._steps.drop_computed()
            self._runner.forget_weights()  # not under the guard: another engine may be making it

    def add_observer(self, observer: StepObserver) -> None:
        """Call it after each step from now on, as those given to the constructor."""
        with self._guard:
            self._log.add_observer(observer)

    def remove_observer(self, observer: StepObserver) -> None:
        with self._guard:
            self._log.remove_observer(observer)

    @property
    def report(self) -> Report:
        """What `explain` says of the model, as it was compiled: its verdict, and what could not be proved."""
        return report_of(self._program, itself(self._intake.model))

    def stats(self) -> EngineStats:
        """Requests, blocks, memory, tokens and graphs at this moment."""
        with self._guard:
            graphs = self._program.graphs, *self._runner.captured_graphs
            stats = self._log.stats(self._scheduler, graphs=graphs, kv_bytes=self._runner.kv_bytes)
            waiting = stats.waiting + self._requests.num_unforked
            return replace(stats, running=len(self._requests) - waiting, waiting=waiting)

    def _wake_readers(self) -> None:
        with self._guard:
            self._outbox.flush()
            requests = list(self._requests)
        for request in requests:
            request.wake()


def has_work(scheduler: Scheduler) -> bool:
    return scheduler.has_work
