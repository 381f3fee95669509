"""What the engine and its kernels do on a GPU, next to the device's ceilings and to what torch and transformers have.

    python benchmarks/gpu.py

Needs a CUDA device, torch, triton and transformers, and for Triton a C compiler and Python's headers, but no network
and no installation: models are made at random in the shapes of Llama-3.1-8B, Llama-3.2-1B, Qwen3-0.6B and a small
mixture of experts. A line is printed as soon as it is known, and the file is written anew with it. Each job of each
part runs in a process of its own, for as long as its share of `--minutes` lasts. The exit status is 1 if anything of
this project failed, was wrong or was not reached; what a peer fails with is named. `gpu_parts/` says what each part
measures.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

BEGAN = time.monotonic()
PARTS = ("ceilings", "attention", "start", "steps", "trace", "drift")
# Of a machine where nothing of this project was installed: what the engine imports at once.
IMPORTED = ("torch", "triton", "transformers", "numpy", "sympy")


def main() -> None:
    arguments = _arguments()
    missing = [name for name in IMPORTED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"these packages must be installed, and are not: {', '.join(missing)}")
    sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed
    import torch

    if not arguments.dry_run and not torch.cuda.is_available():
        raise SystemExit(f"a CUDA device must be there, torch {torch.__version__} finds none; --dry-run needs none")
    if not arguments.dry_run and (lacking := _not_found_by_triton()) is not None:
        raise SystemExit(f"Triton must find {lacking}, since it compiles what launches its kernels")
    from benchmarks.gpu_parts.command import measure

    sys.exit(measure(arguments, BEGAN))


def _not_found_by_triton() -> str | None:
    """What of it is not there, where Triton looks for it: every kernel would fail, after minutes."""
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        return "a C compiler, gcc or clang, or one that the environment variable CC names"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not (Path(headers) / "Python.h").exists():
        return f"Python.h in {headers}, which comes with the package python3-dev or python3-devel"
    return None


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="in this order; default: all")
    parser.add_argument(
        "--json", type=Path, help="write what is known to this file, after every line; gpu.json, or none of a dry run"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="for all parts, without the start and the end; default: 7.33, with --quick 3, of a dry run 60",
    )
    parser.add_argument("--requests", type=int, help="of the trace; default: 256, with --quick 32")
    parser.add_argument("--token-budget", type=int, default=8192, help="of the engine and generate_batch; 8192")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cells, and smaller models")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes on a CPU, kernels interpreted: does it run? No figures"
    )
    arguments = parser.parse_args()
    if arguments.json is None and not arguments.dry_run:
        arguments.json = Path("gpu.json")
    return arguments


if __name__ == "__main__":
    main()
