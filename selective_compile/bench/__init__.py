"""The throughput benchmark: the engine next to transformers' own ways of serving, on one checkpoint.

`settings` says what is run, `trace` who asks for what and when, `peers` who serves it, `ceilings` and `floor`
what the machine could do at best, `rounds` runs it all, `machine` notes where.
"""

from selective_compile.bench.rounds import run_benchmark
from selective_compile.bench.settings import BenchSettings

__all__ = ["BenchSettings", "run_benchmark"]
