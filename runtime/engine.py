"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Lock
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig

from selective_compile.backend import Program
from selective_compile.options import EngineConfig
from selective_compile.runtime.assistants import Assistant, Assistants
from selective_compile.runtime.background import BackgroundThread, weakly
from selective_compile.runtime.batch import BatchAssembler
from selective_compile.runtime.beam_request import RequestSearch
from selective_compile.runtime.drafts import Drafts, PromptLookup
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.intake import Intake
from selective_compile.runtime.kv_cache import LONGEST
from selective_compile.runtime.model_runner import ModelRunner
from selective_compile.runtime.plan import Share, StepPlan
from selective_compile.runtime.prompt import token_ids
from selective_compile.runtime.recording import recording_of
from selective_compile.runtime.records import logprobs_of
from selective_compile.runtime.request import FinishReason, Request
from selective_compile.runtime.request_state import RequestId, RequestState
from selective_compile.runtime.request_table import RequestTable
from selective_compile.runtime.samples import Asked
from selective_compile.runtime.scheduler import Scheduler
from selective_compile.runtime.stats import EngineStats, StepObserver
from selective_compile.runtime.step_log import StepLog
from selective_compile.runtime.verify import Answering, Outcome, answers
from selective_compile.step import StepInputs

TOO_LATE = "deadline must leave time for the tokens asked for, at the pace of the steps so far: it cannot be met"

logger = logging.getLogger(__name__)


class StepError(RuntimeError):
    """A step failed. Its running requests have ended with "error"; the engine can go on."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A scheduled step.

    Attributes:
        requests: for each of the plan's shares its request, and behind it the samples that start from its prompt.
    """

    plan: StepPlan
    requests: tuple[tuple[Request, ...], ...]
    inputs: StepInputs


class Engine:
    """Serves requests on one model, choosing anew at each step which of them run.

    Every method may be called from any thread. Three locks: `_stepping` is held for a step, the model's run
    included, so that there is one step at a time; `_submitting` while a request's options are read, so that its
    id stays free; `_guard` is held for moments and protects all state, so that submitting, cancelling and `stats`
    never wait for the model.

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
    ) -> None:
        """Compile the model and allocate the KV pools.

        Args:
            model: a causal decoder; it is left as it is, its weights are shared.
            config: None takes the defaults.
            program: the model already compiled, so that several engines can share it.
            observers: called after each step, in the thread that ran it. They must not raise: an exception
                leaves `step`, and ends the background thread.
            clock: seconds since any moment; what is decided by time goes by it.

        Raises:
            ValueError: the model cannot be rewritten, or the configuration does not go with it.
            OSError: `config.record` is no place to write to.
        """
        if config is not None and not isinstance(config, EngineConfig):
            raise ValueError(f"config must be an EngineConfig or None, got {config!r}")
        self.config = config if config is not None else EngineConfig()
        self._runner = ModelRunner(model, self.config, program)
        self._program = self._runner.program
        # What a program keeps by request, outside of its pools, no other request can go on from.
        # What recurrences keep of a request is of its last token: no other request can go on from the middle of it.
        kept_in_blocks = not self._program.keeps_requests and not self._program.state_sites
        whole = bool(self._program.call_sites) and kept_in_blocks
        reuses_blocks = self.config.block_reuse and whole
        self._scheduler = Scheduler.configured(
            replace(self.config, max_requests=self._runner.max_requests),
            self._runner.num_blocks,
            block_reuse=reuses_blocks,
            host_slots=self._runner.host_slots,
        )
        pool_tokens = self._scheduler.blocks.most_tokens or LONGEST
        longest = min(pool_tokens, self._program.max_positions or pool_tokens)
        self.longest = longest
        # As many blocks as the model itself has, which are found again from step to step.
        first = next(iter(self._runner.num_blocks.values()), None)
        alike = replace(
            self.config,
            max_kv_tokens=self.config.max_kv_tokens if first is None else first * self.config.block_size,
            block_reuse=True,
            scheduler_policy="max_utilization",
            record=None,
        )
        self._assistants = Assistants(partial(Engine, config=alike))
        self._assembler = BatchAssembler(
            token_budget=self.config.token_budget,
            max_requests=self._runner.max_requests,
            block_size=self.config.block_size,
            max_blocks=-(-longest // self.config.block_size),
            device=self._program.device,
            num_tables=len(self._runner.num_blocks),
            # A program that runs one request after another computes nothing else with it.
            batch_invariant=self.config.batch_invariant and bool(self._program.call_sites),
        )
        self._intake = Intake(
            model,
            self._program,
            replace(self.config, max_requests=self._runner.max_requests),
            reuses_blocks=reuses_blocks,
            pool_tokens=pool_tokens,
            fits_together=self._scheduler.fits_together,
            assistants=self._assistants,
        )
        self._log = StepLog(observers, clock)
        self._recording = recording_of(
            self.config,
            name=type(model).__name__,
            vocab_size=self._program.vocab_size,
            pools=[(reach.window, reach.chunk, blocks) for reach, blocks in self._runner.num_blocks.items()],
            host_slots=self._runner.host_slots,
            max_requests=self._runner.max_requests,
            reuses_blocks=reuses_blocks,
        )
        # A log tells of requests that each compute their own prompt.
        self._forks = self._program.forks_requests and self.config.record is None
        # Drafts change no token; how long they are goes by measured times in a way that a log does not tell.
        self._drafting = self._program.rewinds and self.config.record is None
        self._drafts: dict[int, tuple[Request, Drafts]] = {}  # by number
        self._requests = RequestTable()
        self._stepping = Lock()
        self._submitting = Lock()
        self._guard = Condition()  # notified when there is work
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
                `top_logprobs`, and of the prompt, `prompt_logprobs`. With `num_return_sequences` above 1 the request
                is the first of `samples`, each of them a request; they have the seeds that follow its own, and ids
                such as "a/1". With `num_beams` above 1 all tokens come at the end.

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
        rows_from: int = 0,
        **terms: Any,
    ) -> tuple[Request, ...]:
        """Queue several requests of one prompt, which is computed once for all where that can be; else as `submit`.

        Args:
            asked: of each of them.
            request_id: of the first; the others have a number behind it.
            rows_from: where log probabilities of the prompt are asked for, the token whose next is the first of them.
            terms: those of `submit`, the same for all.
        """
        terms = {"priority": 0, "deadline": None, "user": None, "cache_salt": None, **terms}
        submission = self._intake.prompt(prompt_ids, arrival=self._log.now(), **terms)
        with self._submitting:
            with self._guard:
                ids = self._requests.choose_ids(request_id, len(asked))
            pairs = zip(ids, asked, strict=True)
            every = [self._intake.params(submission, each, one.config, one.options) for each, one in pairs]
            with self._guard:
                requests = []
                for chosen_id, params, one in zip(ids, every, asked, strict=True):
                    state = submission.state(chosen_id, self._requests.next_number, params)
                    if any(each.prompt_logprobs for each in every):
                        state.rows_from = rows_from
                    requests.append(Request(state, params, self))
                    self._requests.add(requests[-1])
                    self._recording.submitted(state, submission, params, one.config, one.options)
                self._enqueue(requests)
                self._guard.notify_all()
        return tuple(requests)

    def _enqueue(self, requests: list[Request]) -> None:
        for request in requests:
            request.samples = tuple(requests)
            drafts = self._drafts_of(request.params)
            if drafts is not None and self._drafting:
                self._drafts[request.state.number] = request, drafts
        first, *others = requests
        beams = first.params.beams
        if beams is not None:
            device = self._program.device
            first.search = RequestSearch(first.state, beams, seed=first.params.seed, device=device)
            first.state.width = beams.num_beams
        longest = max(request.state.final_length for request in requests)
        fits = longest == first.state.final_length and self._scheduler.fits_together(longest, len(requests))
        if others and self._forks and fits:
            first.state.width = len(requests)
            self._requests.fork_later(first, others)
            requests = [first]
        for request in requests:
            self._scheduler.add(request.state)

    def score(self, prompt_ids: Any, continuation_ids: Any) -> tuple[float, ...]:
        """The log probability of each token of a continuation, given the prompt and the tokens before it.

        As `logprobs` of a request that had generated these tokens; waits as `Request.result` does.

        Raises:
            ValueError: as `submit`.
            RuntimeError: a step failed.
        """
        prompt = token_ids(prompt_ids, self._program.vocab_size)
        continuation = token_ids(continuation_ids, self._program.vocab_size)
        options = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "prompt_logprobs": True}
        asked = Asked(config=GenerationConfig(), options=options)
        (request,) = self.submit_samples(prompt + continuation, [asked], rows_from=len(prompt) - 1)
        result = request.result()
        if result.prompt_logprobs is None or len(result.prompt_logprobs) != len(continuation):
            raise RuntimeError(f"scoring ended with {result.finish_reason!r}: {result.error}")
        return result.prompt_logprobs

    def step(self) -> bool:
        """One iteration: schedule, assemble, run, sample, publish. False: there was nothing to do.

        Raises:
            StepError: the step failed. All running requests have ended with "error"; waiting ones go on, unless
                none was running: then no step would get further, and they have ended too.
        """
        with self._stepping:
            with self._failure_ends_running_requests():
                self._propose()
                started = self._log.now()
                step = self._schedule()
                if step is None:
                    return False
                self._copy(step.plan)
                logits = self._runner.run(step.inputs)
                self._publish(step, self._sample(step, logits))
            self._observe(step.plan, started)
        return True

    def cancel(self, request: Request) -> None:
        """End a request with "cancelled" and free its blocks; without effect on one that has finished."""
        with self._guard:
            if not request.finished:
                self._recording.cancelled(request.state)
                self._remove(request)
                request.finish("cancelled")

    @contextmanager
    def running(self) -> Iterator[Engine]:
        """Run the steps in a background thread, which sleeps while there is nothing to do.

        At the end the thread stops after the step it is in. Requests that have not finished by then stay, and
        go on as soon as someone calls `step` or reads from them.

        Raises:
            RuntimeError: a background thread runs already.
        """
        with self._background.running():
            yield self

    @property
    def counts_padding(self) -> bool:
        """Whether padding between tokens would count to the model itself, as it does not here: in a window, say."""
        return self._program.counts_padding

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def driven(self) -> bool:
        """Whether a background thread runs the steps."""
        return self._background.alive

    def drive(self) -> None:
        """Run a step for those who learn of its failure from their requests."""
        try:
            self.step()
        except StepError:
            logger.exception("a step failed; its requests have ended with an error")

    def drop_computed(self, *, if_idle: bool = False) -> None:
        """Drop all keys and values, as a change of the weights does; requests compute again what they need.

        Needed only after a change that PyTorch does not count, such as one through `.data`.

        Args:
            if_idle: not if there are unfinished requests.
        """
        with self._stepping, self._guard:
            if not (if_idle and self._requests):
                self._drop_computed()

    def add_observer(self, observer: StepObserver) -> None:
        """Call it after each step from now on, as those given to the constructor."""
        with self._guard:
            self._log.add_observer(observer)

    def remove_observer(self, observer: StepObserver) -> None:
        with self._guard:
            self._log.remove_observer(observer)

    def stats(self) -> EngineStats:
        with self._guard:
            stats = self._log.stats(self._scheduler, graphs=self._program.graphs)
            return replace(stats, waiting=stats.waiting + self._requests.num_unforked)

    def _drop_computed(self) -> None:
        self._recording.dropped()
        self._scheduler.preempt_all()

    def _drafts_of(self, params: GenerationParams) -> Drafts | None:
        if params.assistant is not None:
            assistant = self._assistants.of(params.assistant, self.vocab_size)
            return Drafts(assistant, most=params.assistant_tokens)
        if params.lookup_tokens:
            return Drafts(PromptLookup(ngram_size=params.lookup_ngram), most=params.lookup_tokens)
        return None

    def _propose(self) -> None:
        """Give drafts to the requests that ask for them and are to compute their last token next."""
        if not self._drafts:
            return
        asked: dict[Assistant, list[tuple[RequestState, Drafts, int]]] = {}
        with self._guard:
            running = self._scheduler.num_running
            worth = self._scheduler.pace.steps.worth_of_a_row(running) if running else 0.0
            step = self._scheduler.pace.steps.predict(running) or math.inf
            for request, drafts in self._drafts.values():
                state, drafter = request.state, drafts.drafter
                if not (state.tables and state.generated and state.pending == 1):
                    continue
                if isinstance(drafter, Assistant):
                    count = drafts.wanted(state.generated, worth + drafter.seconds_per_token / step)
                    asked.setdefault(drafter, []).append((state, drafts, min(count, state.final_length)))
                else:
                    state.draft = drafts.take(drafter.propose(state.tokens, drafts.most), worth)
        for assistant, wanted in asked.items():
            # Without the guard: nobody but a step changes the tokens of a request.
            proposed = assistant.propose([(state.tokens, count, state.terms.cache_salt) for state, _, count in wanted])
            with self._guard:
                for (state, drafts, _), tokens in zip(wanted, proposed, strict=True):
                    if state.tables:
                        state.draft = drafts.take(tokens, worth)

    def _schedule(self) -> _Step | None:
        with self._guard:
            if not self._scheduler.has_work:
                return None
            if self._runner.weights_changed():
                self._drop_computed()
            now = self._log.now()
            plan = self._scheduler.schedule(now)
            self._recording.planned(now, plan)
            for state in plan.refused:
                for request in (self._requests.of(state), *self._requests.take_unforked(state)):
                    self._forget(request).finish("error", TOO_LATE)
            if not plan.shares:
                return None
            requests = self._requests.of_shares(plan.shares)
            # Under the lock, since cancelling a request takes its blocks away.
            inputs = self._assembler.assemble(plan)
            for state in plan.admitted:
                self._requests.of(state).start()
            return _Step(plan=plan, requests=requests, inputs=inputs)

    def _copy(self, plan: StepPlan) -> None:
        """Before the model runs: what it reads comes to the device, what it overwrites goes to the host."""
        if plan.copies:
            started = self._log.now()
            self._runner.copy(plan.copies)
            ended = self._log.now()
            with self._guard:
                if plan.num_host_copies:
                    self._scheduler.pace.copies.observe(plan.num_host_copies, ended - started)
                self._recording.copied(started, ended)

    def _sample(self, step: _Step, logits: Tensor) -> list[list[Outcome]]:
        """The tokens of each request of a share that samples; those of searches go to them."""
        answering: list[Answering] = []
        searched: dict[Request, RequestSearch] = {}
        end = 0
        for (request, *others), share in zip(step.requests, step.plan.shares, strict=True):
            end += share.num_rows
            if share.state.rows_from is not None:
                self._score((request, *others), share, logits[end - share.num_rows : end])
            row = end - 1 - share.drafted
            if share.samples and request.search is not None:
                request.search.give(share.state, logits[row])
                searched[request] = request.search
            elif share.samples:
                drafted = share.state.draft[: share.drafted]
                answering += [Answering(each, row, drafted) for each in (request, *others)]
        if searched:
            computed = {share.state for share in step.plan.shares if share.samples}
            for search in searched.values():
                search.advance(computed)
        return answers(logits, answering, _ends)

    def _score(self, requests: Sequence[Request], share: Share, rows: Tensor) -> None:
        """Keep the log probabilities of a prompt's tokens, each given by the row of the token before it."""
        state = share.state
        first = share.start + share.num_tokens - len(rows) + 1
        # Computed again after a preemption, they are known already.
        skipped = (state.rows_from or 0) + 1 + len(requests[0].prompt_logprobs) - first
        tokens = state.tokens[first + skipped : min(first + len(rows), state.prompt_length)].tolist()
        if tokens:
            found = logprobs_of(rows[skipped : skipped + len(tokens)], tokens)
            for request in requests:
                request.prompt_logprobs += found

    def _publish(self, step: _Step, sampled: list[list[Outcome]]) -> None:
        """Hand out the tokens; requests that are done leave, with their blocks."""
        outcomes = iter(sampled)
        searched: dict[Request, RequestSearch] = {}
        with self._guard:
            self._log.steps += 1
            self._log.tokens_computed += step.plan.num_tokens
            answered: list[tuple[Request, int, Outcome]] = []
            forks: list[list[RequestState]] = []
            for share, (request, *others) in zip(step.plan.shares, step.requests, strict=True):
                answers_now = share.samples and request.search is None
                found = [next(outcomes) for _ in (request, *others)] if answers_now else []
                before = share.state.generated
                if not request.finished:
                    self._advance(share, found[0] if found else [])
                    if found and share.state.width > 1:
                        forks.append(self._fork(request, others, [each[0][0] for each in found[1:]]))
                    if share.samples and request.search is not None and request.search.ready:
                        searched[request] = request.search
                for each, outcomes_of in zip((request, *others), found, strict=False):
                    answered += [(each, before + place, outcome) for place, outcome in enumerate(outcomes_of)]
            # Now that all are known to have computed what they have: the slots of others are not to be taken.
            for states in forks:
                self._runner.go_on_from(states, [states[0]] * len(states))
            for request, search in searched.items():
                self._go_on(request, search)
            ends = [self._answer(*each) for each in answered]
            self._recording.computed(step.plan, [outcome[0] for _, _, outcome in answered], ends)

    def _advance(self, share: Share, found: Sequence[Outcome]) -> None:
        tokens = [token for token, _ in found]
        if share.drafted:
            self._scheduler.verified(share, tokens)
        elif share.state.width > 1 or not any(map(_failed, found)):  # whose request fails is not computed any more
            self._scheduler.advance(share, tokens[0] if tokens else None)
        if tokens and share.state.number in self._drafts:
            self._drafts[share.state.number][1].observe(tokens)

    def _go_on(self, request: Request, search: RequestSearch) -> None:
        """Move the beams of a search as it was decided, or end it."""
        state = request.state
        if search.moves is None:
            self._remove(request)
            if search.error is not None:
                request.finish("error", search.error)
            else:
                result = search.result()
                tokens = result.hypotheses[0].tokens
                self._log.tokens_generated += len(tokens)
                stopped = len(tokens) < request.params.max_new_tokens or tokens[-1] in request.params.eos_token_ids
                request.publish_search(result, "stop" if stopped else "length")
            return
        parents = [state.members[parent] for parent in search.moves.parents] if state.group else None
        if parents is None:
            parents = [state] * search.params.num_beams
            self._scheduler.fork(state, search.others, together=True)
        self._scheduler.rearrange(state.members, search.moves.parents, search.moves.tokens)
        self._runner.go_on_from(state.members, parents)

    def _fork(self, request: Request, others: Sequence[Request], tokens: Sequence[int]) -> list[RequestState]:
        """The other samples go on from the request's prompt, but for those that were cancelled since."""
        self._requests.take_unforked(request.state)
        children = []
        for other, token in zip(others, tokens, strict=True):
            if not other.finished:
                other.state.tokens.append(token)
                other.start()
                children.append(other.state)
        self._scheduler.fork(request.state, children)
        return [request.state, *children]

    def _answer(self, request: Request, generated: int, outcome: Outcome) -> FinishReason | None:
        """Why the request, that has generated so many tokens, ends with this one, or had ended while the model ran."""
        token, record = outcome
        if request.finished:
            return request.finish_reason
        if record is not None and record.error is not None:
            self._remove(request)
            request.finish("error", record.error)
            return "error"
        self._log.tokens_generated += 1
        reason = request.reason_to_end(generated, token, record)
        if reason is not None:
            self._remove(request)
        request.publish(token, record, reason)
        return reason

    def _remove(self, request: Request) -> None:
        if not self._requests.drop_unforked(request):
            self._scheduler.remove(request.state)
            # Those that would have gone on from its prompt are served by themselves.
            for other in self._requests.take_unforked(request.state):
                self._scheduler.add(other.state)
        self._forget(request)

    def _forget(self, request: Request) -> Request:
        self._requests.remove(request)
        self._drafts.pop(request.state.number, None)
        for state in request.state.members:
            self._runner.forget(state)
        self._log.ended(request)
        return request

    @contextmanager
    def _failure_ends_running_requests(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            message = f"step {self._log.steps} failed: {type(error).__name__}: {error}"
            with self._guard:
                self._log.steps += 1
                doomed = list(self._scheduler.running())
                if not doomed and isinstance(error, Exception):  # or whoever waits for them would step for ever
                    doomed = list(self._scheduler.waiting())
                self._recording.failed(doomed, passed_on=not isinstance(error, Exception))
                for state in doomed:
                    if state.finished:
                        continue  # with another of its group
                    for request in reversed(self._requests.group_of(state)):
                        self._remove(request)
                        request.finish("error", message)
                self._scheduler.forget()
            if isinstance(error, Exception):
                raise StepError(message) from error
            raise

    def _observe(self, plan: StepPlan, started: float) -> None:
        ended = self._log.now()
        seconds = ended - started
        with self._guard:
            self._recording.timed(started, ended)
            predicted = self._scheduler.pace.steps.predict(plan.num_tokens)
            self._scheduler.pace.steps.observe(plan.num_tokens, seconds)
            observed = self._log.stepped(plan, started=started, seconds=seconds, predicted=predicted)
        if observed is not None:
            observed.tell()

    def _wake_readers(self) -> None:
        with self._guard:
            requests = list(self._requests)
        for request in requests:
            request.wake()


def _failed(outcome: Outcome) -> bool:
    return outcome[1] is not None and outcome[1].error is not None


def _ends(request: Request, generated: int, outcome: Outcome) -> bool:
    """Whether a request that had generated so many tokens ends with this one."""
    return _failed(outcome) or request.reason_to_end(generated, *outcome) is not None


def has_work(scheduler: Scheduler) -> bool:
    return scheduler.has_work
