"""The scheduler's invariants under random traffic and every policy: arrivals, shared prefixes, ends, failures."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from selective_compile.options import Batching, SchedulerPolicy, WaitingOrder
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.plan import Share, StepPlan
from selective_compile.runtime.request_state import RequestState, Terms
from selective_compile.runtime.scheduler import WHOLE, Scheduler
from selective_compile.step import Reach
from tests.runtime.traffic import Memory, next_beams, next_token, next_tokens

PROMPTS = ([0] * 20, [0, 1] * 10, [0, 0, 0, 1] * 5)


class Arrival(NamedTuple):
    """A request that ends up to `early` tokens before it might; `deadline` in steps from its arrival.

    There will be `width` of it once its prompt is computed: beams if they stay `together`, else samples.
    """

    prompt: list[int]
    length: int
    new_tokens: int
    early: int
    salt: str | None
    priority: int
    deadline: float
    user: str | None
    width: int = 1
    together: bool = False

    def state(self, number: int, now: float) -> RequestState:
        terms = Terms(
            arrival=now,
            priority=self.priority,
            deadline=now + self.deadline,
            user=self.user,
            cache_salt=self.salt,
        )
        prompt = self.prompt[: self.length]
        return RequestState(number, number, prompt, max_new_tokens=self.new_tokens, terms=terms)


ARRIVAL = st.builds(
    Arrival,
    prompt=st.sampled_from(PROMPTS),
    length=st.integers(1, 20),
    new_tokens=st.integers(1, 12),
    early=st.integers(0, 3),
    salt=st.sampled_from([None, None, "tenant"]),
    priority=st.integers(-2, 2),
    deadline=st.sampled_from([math.inf, 5.0, 20.0, 60.0]),
    user=st.sampled_from([None, "a", "b"]),
    width=st.sampled_from([1, 1, 2, 3]),
    together=st.booleans(),
)
CONFIGURATION = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(3, 20),
        "token_budget": st.integers(1, 12),
        "max_requests": st.integers(1, 5),
        "block_size": st.integers(1, 4),
        "block_reuse": st.booleans(),
        "policy": st.sampled_from(get_args(SchedulerPolicy)),
        "order": st.sampled_from(get_args(WaitingOrder)),
        "batching": st.sampled_from(get_args(Batching)),
        "prefill_slowdown": st.sampled_from([None, 1.5]),
        "host_slots": st.sampled_from([0, 0, 3, 12]),
        "kinds": st.sampled_from(
            [
                (WHOLE,),
                (WHOLE,),
                (Reach(window=3),),
                (Reach(chunk=4),),
                (WHOLE, Reach(window=5)),
                (WHOLE, Reach(window=7, chunk=8), Reach(window=1)),
            ]
        ),
    }
)


def make_scheduler(num_blocks: int, kinds: Sequence[Reach], **options: Any) -> Scheduler:
    """Blocks of calls that see less far may be fewer than all requests could hold: then they run short."""
    others = [(BlockPool(max(3, num_blocks // (2 + place))), reach) for place, reach in enumerate(kinds[1:])]
    return Scheduler(BlockPool(num_blocks), *others, reach=kinds[0], **options)


class Simulation:
    """A scheduler with its requests and memory, and a log by which another one can be made to do the same."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.scheduler = make_scheduler(**configuration)
        self.memory = Memory(configuration["block_size"], configuration["kinds"])
        self.weights = 0
        self.copied = 0
        self.copying = 0.1  # seconds a block; computing one takes 0.2 for each of its tokens
        self.now = 0.0
        self.live: dict[int, RequestState] = {}
        self.ends: dict[int, int] = {}
        self.together: set[int] = set()  # whose fork makes a group
        self.began: list[int] = []
        self.finished: list[int] = []
        self.log: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.plans: list[tuple[Any, ...]] = []

    def do(self, what: Callable[..., None], *arguments: Any) -> None:
        self.log.append((what, arguments))
        what(self, *arguments)

    def arrive(self, arrival: Arrival) -> None:
        if self.scheduler.blocks.fits(arrival.length + arrival.new_tokens - 1):
            number = len(self.ends)
            state = self.live[number] = arrival.state(number, self.now)
            if self.scheduler.fits_together(state.final_length, arrival.width):
                state.width = arrival.width
                if arrival.together and state.width > 1:
                    self.together.add(number)
            self.scheduler.add(state)
            self.began.append(number)
            for place in range(state.width):
                self.ends[number + place] = max(1, arrival.new_tokens - arrival.early)

    def cancel(self, which: int) -> None:
        if self.live:
            self.cancelled(self.live[sorted(self.live)[which % len(self.live)]])

    def cancelled(self, state: RequestState) -> None:
        """Of several samples that have not forked one goes, and another has its place."""
        if state.width > 1 and state.number not in self.together:
            self.scheduler.narrow(state)
        else:
            self.end(state.members[0].number)

    def change_weights(self) -> None:
        self.weights += 1
        self.scheduler.preempt_all()

    def fail(self) -> None:
        """A step that computes nothing: those that run end, and nothing of it may be found later."""
        self.schedule()
        for state in list(self.scheduler.running()):
            if state.number in self.live:
                self.end(state.number)
        self.scheduler.forget()

    def step(self, cancelled: int | None = None) -> None:
        """One step; one of its requests is cancelled while the model runs, or none."""
        plan = self.schedule()
        self.memory.copy(plan.copies)
        if plan.num_host_copies:
            self.copied += plan.num_host_copies
            self.scheduler.pace.copies.observe(plan.num_host_copies, self.copying * plan.num_host_copies)
        self.memory.run(plan, self.weights)
        if cancelled is not None and plan.shares:
            self.cancelled(plan.shares[cancelled % len(plan.shares)].state)
        for share in plan.shares:
            if not share.state.finished:
                for state in self.advanced(share):
                    if state.generated == self.ends[state.number]:
                        self.end(state.number)
        if plan.shares:
            self.scheduler.pace.observe(plan, 1.0 + 0.2 * plan.num_tokens)

    def advanced(self, share: Share) -> list[RequestState]:
        """Those that got a token with this share; of a group, its first."""
        state = share.state
        if share.drafted:
            tokens = next_tokens(state, share.drafted)
            self.scheduler.verified(share, tokens[: self.ends[state.number] - state.generated])
            return [state]
        if not share.samples or (state.group is None and state.width == 1):
            self.scheduler.advance(share, next_token(state) if share.samples else None)
            return [state] if share.samples else []
        if state.group is not None or state.number in self.together:
            self.scheduler.advance(share)
            if state.group is None:
                self.scheduler.fork(state, self.children(state), together=True)
            if any(member.pending for member in state.members):
                return []
            self.scheduler.rearrange(state.members, *next_beams(state.members))
            return [state.members[0]]
        children = self.children(state)[: state.width - 1 - state.number % 2]  # some give up their places
        for place, child in enumerate(children):
            child.tokens.append(next_token(state, place))
            self.live[child.number] = child
            self.began.append(child.number)
        self.scheduler.advance(share, next_token(state))
        self.scheduler.fork(state, children)
        return [state, *children]

    def children(self, state: RequestState) -> list[RequestState]:
        new_tokens = state.final_length - state.prompt_length + 1
        return [
            RequestState(number, number, state.tokens, max_new_tokens=new_tokens, terms=state.terms)
            for number in range(state.number + 1, state.number + state.width)
        ]

    def end(self, number: int) -> None:
        self.scheduler.remove(self.live.pop(number))
        self.finished.append(number)

    def schedule(self) -> StepPlan:
        self.now += 1.0
        for state in self.scheduler.running():
            if state.pending == 1 and state.group is None and state.generated:
                # Of some requests nothing is drafted, of others what may be right.
                state.propose(array("q", [0, 1, 0, 0, 1][: state.number % 5]))
        before = list(self.scheduler.running())
        prefilling = set(self.scheduler._prefilling)
        plan = self.scheduler.schedule(self.now)
        for state in plan.refused:
            assert state.finished and not state.generated and state.terms.deadline < math.inf
            self.finished.append(self.live.pop(state.number).number)
        self.check(plan, before, prefilling)
        self.plans.append(picture(plan))
        return plan

    def check(self, plan: StepPlan, before: list[RequestState], prefilling: set[int]) -> None:
        scheduler = self.scheduler
        assert plan.num_tokens <= scheduler.token_budget
        assert len(plan.shares) <= scheduler.max_requests
        assert bool(plan.shares) == bool(self.live), "a step with requests must compute something"
        numbers = [share.state.number for share in plan.shares]
        assert len(set(numbers)) == len(numbers)
        for share in plan.shares:
            assert share.num_tokens >= 1 and share.start == share.state.computed
            end = share.start + share.num_tokens
            assert share.samples == (end - share.drafted == len(share.state.tokens))
            assert all(len(table.blocks) * scheduler.block_size >= end for table in share.state.tables)
        for state in plan.preempted:
            assert not state.tables and state.number not in numbers
        assert not (plan.preempted and scheduler.guarantees), "who was guaranteed to run to its end was preempted"
        if before and scheduler.batching == "inflight_fused":
            assert plan.shares[0].state in before[0].members, "the request that was admitted first is always served"
        if scheduler.order == "first_come" and scheduler.batching == "inflight_fused":
            assert numbers == sorted(numbers)
            assert not numbers or plan.shares[0].state.members[0].number == min(self.live)
        if scheduler.batching != "inflight_fused" and any(share.is_prefill for share in plan.shares):
            # What is computed again may have a single token left, which looks like decode.
            prefilling |= {member.number for state in plan.admitted for member in state.members}
            assert prefilling.issuperset(numbers), "prefill and decode in one step"
        if scheduler.batching == "static":
            assert not (plan.admitted and before), "a static batch was joined"
            assert plan.empty_slots >= 0


def picture(plan: StepPlan) -> tuple[Any, ...]:
    groups = (plan.preempted, plan.admitted, plan.refused)
    shares = [
        (share.state.number, share.start, share.num_tokens, *(list(table.blocks) for table in share.state.tables))
        for share in plan.shares
    ]
    return (plan.copies, shares, *([state.number for state in group] for group in groups), plan.empty_slots)


class TrafficMachine(RuleBasedStateMachine):
    """Few prompts and a small pool, so that many requests begin alike and blocks run short."""

    @initialize(configuration=CONFIGURATION)
    def start(self, configuration: dict[str, Any]) -> None:
        self.simulation = Simulation(configuration)

    @rule(several=st.lists(ARRIVAL, min_size=1, max_size=4))
    def arrive(self, several: list[Arrival]) -> None:
        for arrival in several:
            self.simulation.do(Simulation.arrive, arrival)

    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        self.simulation.do(Simulation.cancel, which)

    @rule(what=st.sampled_from([Simulation.change_weights, Simulation.fail]))
    def disturb(self, what: Callable[..., None]) -> None:
        self.simulation.do(what)

    @rule(count=st.integers(1, 8), cancelled=st.one_of(st.none(), st.integers(0, 9)))
    def run(self, count: int, cancelled: int | None) -> None:
        for number in range(count):
            self.simulation.do(Simulation.step, cancelled if number == 0 else None)
            self.consistent()

    @invariant()
    def consistent(self) -> None:
        scheduler = self.simulation.scheduler
        scheduler.check()
        first = [state for state in scheduler.running() if state.members[0] is state]
        assert len(first) + scheduler.num_waiting == len(self.simulation.live)

    def teardown(self) -> None:
        """Without new arrivals every request ends, once, in bounded time; and the log gives the same batches."""
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        # Served alone from its admission, a request ends within its tokens, each computed once more at most.
        left = simulation.live.items()
        lengths = [
            (len(state.tokens) + simulation.ends[number]) * sum(member.width for member in state.members)
            for number, state in left
        ]
        for _ in range(2 * sum(lengths)):
            simulation.do(Simulation.step)
            self.consistent()
        assert not simulation.scheduler.has_work
        for group in simulation.scheduler.blocks.groups:
            assert group.pool.num_free == group.pool.num_blocks
        assert sorted(simulation.finished) == sorted(simulation.began)
        again = Simulation(simulation.configuration)
        for what, arguments in simulation.log:
            again.do(what, *arguments)
        assert again.plans == simulation.plans


TestTraffic = TrafficMachine.TestCase
TestTraffic.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
