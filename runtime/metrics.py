"""The engine's figures for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from selective_compile.runtime.engine import Engine
from selective_compile.runtime.stats import RequestEnd, StepRecord

# Powers of two from a tenth of a millisecond: a step of a small model on a GPU, to minutes in a queue.
SECONDS = tuple(1e-4 * 2**power for power in range(22))


class EngineMetrics:
    """A registry that follows an engine: `prometheus_client.generate_latest(metrics.registry)` is its text.

    Gauges and counters are read from the engine when they are asked for; what is per step or per request is added up
    after each step, in the thread that ran it.
    """

    def __init__(self, engine: Engine, registry: CollectorRegistry | None = None) -> None:
        """Follow the engine from now on.

        Args:
            registry: where to register the metrics; None: one of its own, `registry`.

        Raises:
            ValueError: the registry has metrics of an engine already.
        """
        self.registry = registry if registry is not None else CollectorRegistry()
        self._engine = engine
        self._seen = engine.stats()
        self._gauges = {
            name: Gauge(f"selective_{name}", text, registry=self.registry)
            for name, text in (
                ("requests_running", "Requests that have blocks"),
                ("requests_waiting", "Requests that have none yet, or gave them back"),
                ("blocks_used", "KV blocks that a request holds"),
                ("blocks_idle", "Free KV blocks whose content can be reused"),
                ("host_slots_used", "KV blocks whose content is in host memory"),
                ("blocks_max", "KV blocks of the pool"),
                ("empty_slots", "Places of a static batch whose request has ended"),
            )
        }
        self._counters = {
            name: Counter(f"selective_{name}", text, registry=self.registry)
            for name, text in (
                ("steps", "Steps, failed ones included"),
                ("preemptions", "Times that a request gave up its blocks"),
                ("tokens_computed", "Tokens that went through the model"),
                ("tokens_generated", "Tokens that requests received"),
                ("tokens_admitted", "Tokens of requests when they were admitted"),
                ("tokens_reused", "Those of them that were found computed"),
            )
        }
        ends = "Requests that ended, by how"
        self._ends = Counter("selective_requests", ends, ["finish_reason"], registry=self.registry)
        self._seconds = {
            name: Histogram(f"selective_{name}_seconds", text, registry=self.registry, buckets=SECONDS)
            for name, text in (
                ("step", "A step"),
                ("queue", "From submission to the first step of a request"),
                ("first_token", "From submission to the first token"),
                ("between_tokens", "Between two tokens of a request, its average"),
                ("request", "From submission to the end"),
            )
        }
        self._update_gauges(empty_slots=0)
        engine.add_observer(self._observe)

    def close(self) -> None:
        """Follow the engine no more."""
        self._engine.remove_observer(self._observe)

    def _observe(self, record: StepRecord) -> None:
        before, now = self._seen, self._engine.stats()
        self._seen = now
        for name, counter in self._counters.items():
            counter.inc(getattr(now, name) - getattr(before, name))
        self._update_gauges(empty_slots=record.empty_slots)
        self._seconds["step"].observe(record.seconds)
        for end in record.ended:
            self._count(end)

    def _update_gauges(self, *, empty_slots: int) -> None:
        stats = self._seen
        values = {"requests_running": stats.running, "requests_waiting": stats.waiting, "empty_slots": empty_slots}
        values |= {
            name: getattr(stats, name) for name in ("blocks_used", "blocks_idle", "host_slots_used", "blocks_max")
        }
        for name, value in values.items():
            self._gauges[name].set(value)

    def _count(self, end: RequestEnd) -> None:
        self._ends.labels(finish_reason=end.finish_reason).inc()
        timing = end.timing
        measured = {
            "queue": timing.queued,
            "first_token": timing.first_token,
            "between_tokens": timing.between_tokens,
            "request": timing.total,
        }
        for name, seconds in measured.items():
            if seconds is not None:
                self._seconds[name].observe(seconds)
