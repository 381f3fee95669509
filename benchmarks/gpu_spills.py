"""Whether attention kernels spill registers, for configurations drawn at random, compiled for GPUs that are not there.

    python benchmarks/gpu_spills.py                    # 100 of them: minutes
    python benchmarks/gpu_spills.py --count 400 --seed 2

Targets, dtypes, head sizes, groups of query heads, features and kinds of step that tests have not met in this
combination; compiled as the tests compile and as they ship.  Prints those that spill or need more shared memory than
the target has, and fails if there are any.  Needs pytest, torch and triton, but no GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.kernels.ahead_of_time import TARGETS, Usage
from tests.kernels.test_latent_attention_triton import VARIANTS, compile_latents
from tests.kernels.test_ragged_attention_triton import EVERYTHING, compile_attention

SIZES = (33, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 512, 576)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 40, 64)
ALL: dict[str, Any] = {"given": ("sinks", "slopes"), **EVERYTHING}
FEATURES: tuple[dict[str, Any], ...] = (
    {"split": True},
    {"split": True, "BLOCK_SIZE": 16},
    {"split": True, "given": ("slopes",)},
    {"split": True, "WINDOW": 4096, "SOFTCAP": 50.0},
    {"given": ("sinks",), "WINDOW": 128},
    {"given": ("sinks", "slopes"), "PREFIX": 300, "SOFTCAP": 30.0},
    ALL,
    {**ALL, "split": True, "BLOCK_SIZE": 32},
)


def attention(drawn: random.Random) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    dtype, size, rows = drawn.choice(("bf16", "fp16", "fp32")), drawn.choice(SIZES), drawn.choice((8, 512))
    options = {"group": drawn.choice(GROUPS), **drawn.choice(FEATURES)}
    options["fp8"] = drawn.choice((False, True)) and dtype != "fp32"  # which is refused
    return compile_attention, (dtype, size, rows), options


def latents(drawn: random.Random) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return compile_latents, (drawn.choice(sorted(VARIANTS)), drawn.choice((*GROUPS, 128)), drawn.choice((8, 512))), {}


def drawn_ones(count: int, seed: int) -> list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]:
    """Target, what compiles, and its arguments: of four one is of latents."""
    drawn, found = random.Random(seed), []
    while len(found) < count:
        target = drawn.choice(TARGETS)
        compile_it, arguments, options = drawn.choice((attention, attention, attention, latents))(drawn)
        narrow = "fp8" in arguments[0] or options.get("fp8")
        if not (target == TARGETS[0] and narrow):  # no numbers of e4m3 below compute capability 8.9
            found.append((target, compile_it, arguments, options))
    return found


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="configurations")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    arguments, bad = parser.parse_args(), 0
    with TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # what an earlier run compiled would prove nothing
        for target, compile_it, given, options in tqdm(drawn_ones(arguments.count, arguments.seed), unit=" kernels"):
            usage = Usage.of(compile_it(target, *given, **options), target, Path(folder))
            if usage.spilled or usage.shared > target.shared_memory:
                bad += 1
                tqdm.write(f"{target} {compile_it.__name__} {given} {options}: {usage}")
    print(f"{bad} of {arguments.count} configurations spill or do not fit")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
