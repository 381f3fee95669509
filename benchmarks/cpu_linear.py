"""How near the native CPU linear kernel comes to the machine; also F.linear, oneDNN with a packed copy, int8 weights.

    python benchmarks/cpu_linear.py --threads 2 --json result.json

The times of int8 weights over those of the model's own in docs/engine.md are `int8` over `ours`:

    python benchmarks/cpu_linear.py --threads 2 --shapes 768x4096 2048x768 768x32000 --rows 1 2 4 8 16 32 64

With ``--by-columns`` the weights of ours and F.linear lie as GPT-2 has them, [K, N].

The floor of a product is the larger of two times: its bytes at the machine's read rate, and its operations at
the machine's matrix rate (the better of F.linear and packed oneDNN at 2048 x 2048 x 2048). `share` is the
floor over the time taken. All are timed in turns and the figures are medians over the turns, so that a machine
that is not quiet disturbs every one; with one thread the clock is the thread's own, which leaves out what other
processes took. As in a real step, 256 MB of other weights go through the cache before one is used again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.int8_ops import as_int8
from selective_compile.kernels.linear_cpu import linear, linears_int8, unavailable_reason

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = ["768x768", "768x1280", "768x2048", "768x4096", "2048x768", "768x32000", "896x4864", "2048x8192"]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
ROTATED_BYTES = 256 * 2**20
TURN_SECONDS = 0.02


def main() -> None:
    arguments = _arguments()
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(reason)
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    results = []
    for dtype in (DTYPES[name] for name in arguments.dtypes):
        read, rate = ceilings(dtype, clock, arguments.turns)
        limits = f"read {read / 1e9:.1f} GB/s, matrix {rate / 1e9:.0f} GFLOP/s"
        print(f"{dtype} on {arguments.threads} threads: {limits}", flush=True)
        for shape in arguments.shapes:
            for result in measure(shape, dtype, read, rate, clock, arguments):
                results.append(result)
                print(_line(result), flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"threads": arguments.threads, "results": results}, indent=1) + "\n", encoding="utf-8"
        )


def ceilings(dtype: torch.dtype, clock: Callable[[], float], count: int) -> tuple[float, float]:
    """Bytes per second of a large read, and operations per second of a large matrix product."""
    block = torch.ones(2**27)
    x, weight = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2048)
    calls = [block.sum, lambda: F.linear(x, weight), lambda: onednn(x, packed)]
    read, *products = turns(calls, clock, count)
    return block.nbytes / read, 2 * 2048**3 / min(products)


def measure(
    shape: str,
    dtype: torch.dtype,
    read: float,
    rate: float,
    clock: Callable[[], float],
    arguments: argparse.Namespace,
) -> Iterator[dict[str, float | str]]:
    """One line per number of rows, for a weight [N, K] given as "KxN"."""
    depth, columns = map(int, shape.split("x"))
    copies = max(3, -(-ROTATED_BYTES // (depth * columns * dtype.itemsize)))
    weights = [torch.randn(columns, depth).mul_(depth**-0.5).to(dtype) for _ in range(copies)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in weights]
    numbers, scales = as_int8(weights[0])
    if arguments.by_columns:
        weights = [weight.t().contiguous().t() for weight in weights]
    int8 = [numbers.clone() for _ in range(max(3, -(-ROTATED_BYTES // numbers.nbytes)))]
    turn, int8_turn = itertools.cycle(range(copies)), itertools.cycle(int8)
    for rows in arguments.rows:
        x = torch.randn(rows, depth).to(dtype)
        calls = [
            lambda x=x: linear(x, weights[next(turn)]),
            lambda x=x: F.linear(x, weights[next(turn)]),
            lambda x=x: onednn(x, packed[next(turn)]),
            lambda x=x: linears_int8(x, [next(int8_turn)], [scales], [None])[0],
        ]
        ours, aten, yardstick, narrow = turns(calls, clock, arguments.turns)
        moved = (depth * columns + rows * (depth + columns)) * dtype.itemsize
        floor = max(moved / read, 2 * rows * depth * columns / rate)
        yield {
            **{
                "dtype": str(dtype).removeprefix("torch."),
                "K": depth,
                "N": columns,
                "M": rows,
                "floor": floor,
            },
            **{"ours": ours, "F.linear": aten, "packed": yardstick, "int8": narrow, "share": floor / ours},
        }


def onednn(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def turns(calls: list[Callable[[], Tensor]], clock: Callable[[], float], count: int) -> list[float]:
    """Median seconds of a call of each, called in turns; short ones several times a turn."""
    repeats = []
    for call in calls:
        call()
        begin = clock()
        call()
        repeats.append(max(1, min(200, int(TURN_SECONDS / max(clock() - begin, 1e-6)))))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for call, repeat, timed in zip(calls, repeats, seconds, strict=True):
            begin = clock()
            for _ in range(repeat):
                call()
            timed.append((clock() - begin) / repeat)
    return [statistics.median(timed) for timed in seconds]


def _line(result: dict[str, float | str]) -> str:
    size = f"{result['dtype']:8} K {result['K']:>4} N {result['N']:>5} M {result['M']:>3}"
    times = "  ".join(f"{name} {result[name] * 1e6:9.1f}" for name in ("floor", "ours", "F.linear", "packed", "int8"))
    ratios = "  ".join(f"{result[name] / result['ours']:5.2f}x {name}" for name in ("F.linear", "packed", "int8"))
    return f"{size}  {times} us  share {result['share']:.2f}  {ratios}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, metavar="M")
    parser.add_argument("--by-columns", action="store_true", help="weights [K, N], not [N, K]")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
