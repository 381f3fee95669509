"""How near the native CPU kernels with a state come to the machine: decode to copying the states, prefill per token.

    python benchmarks/cpu_state.py --threads 2 --json result.json

A decode step reads and writes the state of each request once, and so does copying it. The two are timed in turns, and
the figures are medians over the turns; `share` is the copy's time over the kernel's. Sizes are those of one layer of
Mamba-2 130M, falcon_mamba 7B, Qwen3-Next and Kimi Linear, RecurrentGemma, RWKV-4 and xLSTM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selective_compile.kernels import state_cpu

Shapes = tuple[tuple[int, ...], ...]
# Rows (without T), parameters, numbers in front of the pool, a slot.
OPS: dict[str, tuple[Shapes, dict[int, tuple[int, ...]], tuple[float, ...], tuple[int, ...]]] = {
    "causal_conv1d": (((8192,),), {1: (8192, 4), 2: (8192,)}, (), (8192, 3)),
    "selective_scan": (((8192,), (8192,), (16,), (16,)), {2: (8192, 16), 5: (8192,)}, (), (8192, 16)),
    "ssd": (((24, 64), (24,), (1, 128), (1, 128)), {2: (24,), 5: (24,)}, (), (24, 64, 128)),
    "gated_delta_rule": (((16, 128), (16, 128), (32, 128), (32,), (32,)), {}, (0.1,), (32, 128, 128)),
    "linear_recurrence": (((4096,), (4096,)), {}, (), (4096,)),
    "wkv": (((4096,), (4096,)), {0: (4096,), 1: (4096,)}, (), (4096, 3)),
    "mlstm": (((8, 256), (8, 256), (8, 512), (8,), (8,)), {}, (0.1, 1e-6), (8, 257, 513)),
}


def main() -> None:
    arguments = _arguments()
    if (reason := state_cpu.unavailable_reason()) is not None:
        raise SystemExit(reason)
    torch.set_num_threads(arguments.threads)
    results = [measure(op, arguments) for op in arguments.ops]
    if arguments.json:
        machine = {"threads": arguments.threads, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n", encoding="utf-8")


def measure(op: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """One row each of many requests, and a prompt of one."""
    decode, states = make_step(op, [1] * arguments.requests, past=9)
    prompt, _ = make_step(op, [arguments.prompt], past=0)
    copies = torch.empty_like(states)
    kernel, copy, prefill = turns([decode, lambda: copies.copy_(states), prompt], arguments.turns)
    moved = 2 * states.nbytes / 1e9
    result: dict[str, float | str] = {
        "op": op,
        "GB/s": moved / kernel,
        "copy GB/s": moved / copy,
        "share": copy / kernel,
    }
    result["prefill us/token"] = prefill / arguments.prompt * 1e6
    print(
        "  ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{value:18}" for name, value in result.items()
        )
    )
    return result


def make_step(op: str, rows: list[int], past: int) -> tuple[Callable[[], Tensor], Tensor]:
    """A call of the op with so many rows of each request, and the states that it changes."""
    shapes, parameters, numbers, slot = OPS[op]
    total = sum(rows)
    tensors = [torch.rand(total, *shape).neg() * 0.1 for shape in shapes]
    for at, shape in sorted(parameters.items()):
        tensors.insert(at, -torch.rand(*shape))
    pool = torch.rand(len(rows), *slot)
    bounds = torch.tensor([0, *rows]).cumsum(0).int()
    lengths, slots = bounds.diff() + past, torch.arange(len(rows))
    options: tuple[Any, ...] = (True,) if op == "causal_conv1d" else ()
    arguments = (*tensors, *numbers, pool, bounds, lengths, slots, *options)
    return lambda: getattr(state_cpu, op)(*arguments), pool


def turns(bodies: list[Callable[[], object]], count: int) -> list[float]:
    """Median seconds of each, taken in turns after one that warms up."""
    seconds: list[list[float]] = [[] for _ in bodies]
    for turn in range(count + 1):
        for body, taken in zip(bodies, seconds, strict=True):
            begin = time.perf_counter()
            body()
            if turn:
                taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in seconds]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
