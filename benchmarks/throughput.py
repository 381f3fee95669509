"""Useful output tokens per second of the engine, `generate` and `generate_batch`: what `make bench` runs.

    python benchmarks/throughput.py --out result.json

The same as `selective-compile bench`, which an installed package has too. The code is in
`selective_compile/bench/`.
"""

from __future__ import annotations

import sys

from selective_compile.cli import app

if __name__ == "__main__":
    app(["bench", *sys.argv[1:]])
