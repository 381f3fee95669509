"""How near the native CPU attention kernel comes to the machine: decode to read bandwidth, prefill to matmul rate.

    python benchmarks/cpu_attention.py --threads 2 --json result.json

The kernel and the yardstick are timed in turns, and the figures are medians over the turns, so that a machine that is
not quiet disturbs both. `share` is the kernel's rate over the yardstick's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from selective_compile import huge_pages
from selective_compile.bench.ceilings import read_blocks
from selective_compile.int8_rows import quantised
from selective_compile.kernels.ragged_attention_cpu import ragged_attention, unavailable_reason

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    arguments = _arguments()
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(reason)
    torch.set_num_threads(arguments.threads)
    results = []
    for name in arguments.dtypes:
        for kv_dtype in arguments.kv_dtype:
            for case in (decode, prefill):
                results.append({"dtype": name, "kv_dtype": kv_dtype, **case(DTYPES[name], kv_dtype, arguments)})
                print(_line(results[-1]), flush=True)
    results.append(overhead())
    print(f"launch       one row, 1 key: {results[-1]['microseconds']:.1f} us")
    if arguments.json:
        machine = {"processor": _processor(), "threads": arguments.threads, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n", encoding="utf-8")


def decode(dtype: torch.dtype, kv_dtype: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """One row each of many requests with a long context; bytes of keys and values read per second, scales included.

    `blocks` is the rate of a loop that does nothing but read the same blocks in the same order: blocks lie anywhere,
    and a processor that reads one large piece at full speed may not do so with many small ones.
    """
    step = make_step([(1, arguments.context)] * arguments.requests, dtype, arguments, kv_dtype)
    read = sum(pool.nbytes for pool in step[3:5])
    block = torch.ones(2**28)  # 1 GiB: far beyond any cache
    order = torch.cat([row[: -(-arguments.context // arguments.block_size)] for row in step[7]])

    def loop() -> None:
        for pool in step[3:5]:
            read_blocks(pool, order)

    kernel, yardstick, plain = turns([lambda: ragged_attention(*step), lambda: block.sum(), loop], arguments.turns)
    rate, floor, blocks = read / kernel / 1e9, block.nbytes / yardstick / 1e9, read / plain / 1e9
    return {"case": "decode", "unit": "GB/s", "rate": rate, "yardstick": floor, "share": rate / floor, "blocks": blocks}


def prefill(dtype: torch.dtype, kv_dtype: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """A chunk of one request with as much again before it; operations per second, without the masked ones."""
    rows = arguments.chunk
    step = make_step([(rows, 2 * rows)], dtype, arguments, kv_dtype)
    pairs = rows * rows + rows * (rows + 1) / 2
    operations = 4 * pairs * arguments.query_heads * arguments.head_size
    a, b = (torch.randn(1024, 1024, dtype=dtype) for _ in range(2))
    kernel, yardstick = turns([lambda: ragged_attention(*step), lambda: a @ b], arguments.turns)
    rate, floor = operations / kernel / 1e9, 2 * 1024**3 / yardstick / 1e9
    return {"case": "prefill", "unit": "GFLOP/s", "rate": rate, "yardstick": floor, "share": rate / floor}


def overhead() -> dict[str, float | str]:
    """Seconds of a call with next to nothing to compute: the launcher, the plan, the return."""
    sizes = argparse.Namespace(query_heads=1, kv_heads=1, head_size=16, block_size=16)
    step = make_step([(1, 1)], torch.float32, sizes)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(500):
            ragged_attention(*step)
        seconds.append((time.perf_counter() - begin) / 500)
    return {"case": "launch", "unit": "us", "microseconds": min(seconds) * 1e6}


def make_step(
    requests: list[tuple[int, int]], dtype: torch.dtype, sizes: argparse.Namespace, kv_dtype: str = "float"
) -> tuple:
    """The arguments of ragged_attention for (rows, context length) pairs; blocks lie in random order."""
    lengths, contexts = (torch.tensor(column, dtype=torch.int32) for column in zip(*requests, strict=True))
    needed = [-(-context // sizes.block_size) for _, context in requests]
    table = torch.zeros(len(requests), max(needed), dtype=torch.int32)
    order = torch.randperm(sum(needed)).to(torch.int32)
    for n, blocks in enumerate(order.split(needed)):
        table[n, : len(blocks)] = blocks
    shape = (sum(needed), sizes.kv_heads, sizes.block_size, sizes.head_size)
    slots = [
        table[n, position // sizes.block_size] * sizes.block_size + position % sizes.block_size
        for n, (rows, context) in enumerate(requests)
        for position in range(context - rows, context)
    ]
    rows = len(slots)
    query = torch.randn(rows, sizes.query_heads, sizes.head_size).to(dtype)
    key, value = (torch.randn(rows, sizes.kv_heads, sizes.head_size).to(dtype) for _ in range(2))
    filled = [torch.randn(shape).to(dtype) for _ in range(2)]
    if kv_dtype == "int8":
        filled = [quantised(pool) for pool in filled]
    pools = [huge_pages.zeros(tuple(pool.shape), pool.dtype).copy_(pool) for pool in filled]  # as the engine's
    cu_seqlens_q = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    mapping = torch.tensor(slots, dtype=torch.int64)
    return (query, key, value, *pools, cu_seqlens_q, contexts, table, mapping, sizes.head_size**-0.5, 0, 0.0)


def turns(calls: Sequence[Callable[[], object]], count: int) -> list[float]:
    """Median seconds of each, called in turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(count + 1):
        for timed, call in zip(seconds, calls, strict=True):
            begin = time.perf_counter()
            call()
            if turn:  # the first one warms up
                timed.append(time.perf_counter() - begin)
    return [statistics.median(timed) for timed in seconds]


def _line(result: dict[str, float | str]) -> str:
    rate, floor = f"{result['rate']:.1f}", f"{result['yardstick']:.1f}"
    dtypes = f"{result['dtype']} {result['kv_dtype']}"
    line = f"{result['case']:8} {dtypes:15} {rate:>7} of {floor:>7} {result['unit']}: {result['share']:.2f}"
    if "blocks" not in result:
        return line
    of_blocks = float(result["rate"]) / float(result["blocks"])
    return f"{line}; {of_blocks:.2f} of the {result['blocks']:.1f} of a loop over these blocks"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--requests", type=int, default=16, help="of the decode case")
    parser.add_argument("--context", type=int, default=8192, help="of each request of the decode case")
    parser.add_argument("--chunk", type=int, default=512, help="rows of the prefill case")
    parser.add_argument("--query-heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument(
        "--kv-dtype",
        nargs="+",
        choices=("float", "int8"),
        default=["float"],
        help="of the pools: that of the rows, or int8 with a scale a row",
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
