"""What the scheduler costs a step: microseconds with 256 running requests and 10,000 waiting, under every policy.

    python benchmarks/scheduler.py --json result.json

Prediction before the first run: 0.35 us of `schedule` and 0.25 us of `advance` for each running request, that is 150
us a step; and 8 us more for each request that comes and goes. The bar is 200 us, the goal 60.

"turnover" is the mean over the steps while requests with a prompt of 100 tokens that nobody shares generate 33 to 95
each, so that at 256 running ones 4 leave and 4 are admitted at each step; "steady" is the mean over steps in which
nobody comes or goes. Those waiting stay 10,000. Both count `schedule`, `advance` of every share and `remove`; not the
model, the batch assembly, sampling or submitting. The clock is that of the thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any, get_args

from selective_compile.options import Batching, SchedulerPolicy, WaitingOrder
from selective_compile.runtime.block_names import block_names
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.request_state import RequestState, Terms
from selective_compile.runtime.scheduler import Scheduler

BAR = 200.0
WARM_UP = 128  # steps
PROMPT, BLOCK = 100, 16
OUTPUTS = (33, 95)


def main() -> None:
    arguments = _arguments()
    results = []
    print(f"{'policy':20} {'order':10} {'batching':15} {'steady':>8} {'turnover':>9}  us a step", flush=True)
    for policy in get_args(SchedulerPolicy):
        for order in get_args(WaitingOrder):
            for batching in get_args(Batching):
                result = measure(arguments, policy=policy, order=order, batching=batching)
                results.append(result)
                cost = f"{result['steady']:8.1f} {result['turnover']:9.1f}"
                print(f"{policy:20} {order:10} {batching:15} {cost}", flush=True)
    worst = max(float(result["turnover"]) for result in results)
    print(f"worst {worst:.1f} us, bar {BAR:.0f} us: {'met' if worst <= BAR else 'MISSED'}")
    if arguments.json:
        sizes = {"running": arguments.running, "waiting": arguments.waiting, "steps": arguments.steps}
        arguments.json.write_text(json.dumps({**sizes, "results": results}, indent=1) + "\n")


def measure(arguments: argparse.Namespace, **chosen: Any) -> dict[str, str | float]:
    for_ever = arguments.steps + WARM_UP
    steady = costs(arguments, (for_ever, for_ever), chosen)
    return {
        **chosen,
        "steady": statistics.fmean(steady),
        "turnover": statistics.fmean(costs(arguments, OUTPUTS, chosen)),
    }


def costs(arguments: argparse.Namespace, outputs: tuple[int, int], chosen: dict[str, Any]) -> list[float]:
    """Microseconds of each step, once the lengths of the running requests have spread."""
    draw = random.Random(0)
    running = arguments.running
    pool = BlockPool(running * -(-(PROMPT + outputs[1]) // BLOCK) + 2 * running)
    budget = running * (PROMPT + 1)
    scheduler = Scheduler(pool, token_budget=budget, max_requests=running, block_size=BLOCK, **chosen)
    ends: dict[int, int] = {}
    found = []
    for step in range(WARM_UP + arguments.steps):
        while scheduler.num_running + scheduler.num_waiting < running + arguments.waiting:
            number = len(ends)
            ends[number] = draw.randint(*outputs)
            scheduler.add(request(number, float(step), outputs[1], draw))
        started = time.thread_time_ns()
        plan = scheduler.schedule(float(step))
        for share in plan.shares:
            scheduler.advance(share, 1 if share.samples else None)
        spent = time.thread_time_ns() - started
        done = [share.state for share in plan.shares if share.state.generated == ends[share.state.number]]
        started = time.thread_time_ns()
        for state in done:
            scheduler.remove(state)
        spent += time.thread_time_ns() - started
        if step >= WARM_UP:
            found.append(spent / 1e3)
    return found


def request(number: int, now: float, most: int, draw: random.Random) -> RequestState:
    terms = Terms(arrival=now, priority=draw.randrange(5), deadline=now + 1e6 * draw.random(), user=draw.randrange(100))
    state = RequestState(number, number, [number] * PROMPT, max_new_tokens=most, terms=terms)
    block_names(state, PROMPT // BLOCK, BLOCK)  # as `Engine.submit` does
    return state


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
