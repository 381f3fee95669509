"""How well attention of decoding would use a GPU's bandwidth, by how keys are cut: a simulation, on any machine.

    python benchmarks/split_plan.py

Programs share the device's bandwidth alike, but none has more than a part (`--most`) of a processor's fair share, each
begins with a wait for its first keys, and a processor has room for three.  Shares of the bandwidth over a grid of equal
requests, and over steps of unequal ones, with at most one wave of pieces where that is near (`at once`), and without.

A prediction, for `benchmarks/gpu.py` to hold to: it is made to compare one cut with another.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from selective_compile.kernels.ragged_attention_tiles import AT_ONCE_OF_SMALL, SplitConfig, split_config
from selective_compile.kernels.split_plan_triton import TIMES

PROCESSORS, HEADS, BLOCK_N = 132, 8, 64
CONTEXTS, REQUESTS = (512, 1024, 4096, 16384, 32768), (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 50, 64, 128, 256)
LEAST, MOST = 2**14, 2**22  # keys of a step: 64 MB of 8 heads of 128 numbers of 16 bits, and what takes too long here
WAIT = 100.0  # for a program's first keys, in keys of a processor's fair share: 1.6 microseconds at 4.2 TB/s


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--most", type=float, nargs="+", default=[0.5, 0.7, 1.0], help="of a fair share, of a program")
    arguments = parsed(parser)
    now = split_config(parts=HEADS, keys=None, large=False, processors=PROCESSORS)
    plans = {"at once": now, "finer": replace(now, at_once=0)}
    rows = []
    print(f"{'most':>5} {'plan':8} {'steps':8} {'worst':>6} {'mean':>6}  of")
    for most in arguments.most:
        for plan, splits in plans.items():
            for name, steps in (("alike", grid(arguments)), ("unequal", unequal(arguments))):
                shares = sorted((share(step, splits, most), len(step), max(step)) for step in steps)
                mean = sum(each[0] for each in shares) / len(shares)
                worst, requests, longest = shares[0]
                rows.append({"most": most, "plan": plan, "steps": name, "worst": worst, "mean": mean})
                print(
                    f"{most:5} {plan:8} {name:8} {worst:6.2f} {mean:6.2f}  {requests} requests, the longest {longest}"
                )
    keep(arguments.json, {"rows": rows})


def grid(arguments: argparse.Namespace) -> list[list[int]]:
    steps = [[context] * requests for context in CONTEXTS for requests in REQUESTS]
    steps = [step for step in steps if LEAST <= sum(step) <= MOST]
    return steps[::9] if arguments.quick else steps


def unequal(arguments: argparse.Namespace) -> list[list[int]]:
    chosen = random.Random(0)
    counts = (2, 3, 5, 8, 12, 16, 20, 30, 40, 45, 48, 60)
    steps = [[int(2 ** chosen.uniform(4, 15)) for _ in range(chosen.choice(counts))] for _ in range(60)]
    steps = [step for step in steps if sum(step) >= LEAST]
    return steps[::20] if arguments.quick else steps


def share(step: Sequence[int], splits: SplitConfig, most: float) -> float:
    """Of the bandwidth, by a step of requests of so many keys."""
    pieces = pieces_of(step, length_of(step, splits))
    programs = [keys for keys in reversed(pieces) for _ in range(HEADS)]
    return sum(programs) / PROCESSORS / ended(programs, PROCESSORS * AT_ONCE_OF_SMALL, most)


def length_of(step: Sequence[int], splits: SplitConfig) -> int:
    """Keys of a split, as `split_plan_triton` finds them."""
    walked, room = sum(step), splits.at_once - len(step)
    length = max(over(walked, splits.slots), min(over(walked, splits.few), splits.long), splits.shortest)
    alike = over(walked, max(room, 1))
    tight = over(over(walked, max(splits.at_once, 1)), BLOCK_N) * BLOCK_N
    if sum(over(keys, tight) for keys in step) <= splits.at_once:
        alike = tight
    if room > 0 and length * room < walked and length <= alike <= TIMES.value * length:
        length = alike
    return over(length, BLOCK_N) * BLOCK_N


def pieces_of(step: Sequence[int], length: int) -> list[int]:
    found: list[int] = []
    for keys in step:
        each = over(over(keys, over(keys, length)), BLOCK_N) * BLOCK_N
        found += [min(each, keys - start) for start in range(0, keys, each)]
    return found


def over(number: int, divisor: int) -> int:
    return -(-number // divisor)


def ended(programs: Sequence[int], room: int, most: float) -> float:
    """When the last one has, in the time that a processor's fair share takes for a key.

    Those that read are served alike; so who has read least so far of what it wants since it began ends first.
    """
    left = deque(programs)
    starting: list[float] = []
    wanted: deque[int] = deque()
    reading: list[float] = []  # what each will have been served when it ends, as `served` is of all since the start
    now = served = 0.0
    while left or starting or reading:
        while left and len(starting) + len(reading) < room:
            heapq.heappush(starting, now + WAIT)
            wanted.append(left.popleft())
        rate = min(most, PROCESSORS / len(reading)) if reading else 0.0
        ends = now + (reading[0] - served) / rate if reading else float("inf")
        starts = starting[0] if starting else float("inf")
        served += rate * (min(ends, starts) - now)
        now = min(ends, starts)
        if starts <= ends:
            heapq.heappop(starting)
            heapq.heappush(reading, served + wanted.popleft())
        else:
            heapq.heappop(reading)
    return now


if __name__ == "__main__":
    main()
