"""The engine's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from selective_compile.runtime.engine import Engine
from selective_compile.runtime.stats import EngineStats, RequestEnd, StepRecord

# Powers of two from a tenth of a millisecond: a step of a small model on a GPU, to minutes in a queue.
SECONDS = tuple(1e-4 * 2**power for power in range(22))
NOW = {
    "running": ("requests_running", "Requests that have blocks"),
    "waiting": ("requests_waiting", "Requests that have none yet, or gave them back"),
    "requests_max": ("requests_max", "Requests that can run at a time"),
    "blocks_used": ("blocks_used", "KV blocks that a request holds"),
    "blocks_free": ("blocks_free", "KV blocks that none holds"),
    "blocks_idle": ("blocks_idle", "Free KV blocks whose content can be reused"),
    "blocks_max": ("blocks_max", "KV blocks of the pool"),
    "block_size": ("block_tokens", "Tokens of a KV block"),
    "host_slots_used": ("host_slots_used", "KV blocks whose content is in host memory"),
    "host_slots_max": ("host_slots_max", "KV blocks that there is host memory for"),
}
SINCE = {
    "steps": ("steps", "Steps, failed ones included"),
    "preemptions": ("preemptions", "Times that a request gave up its blocks"),
    "tokens_computed": ("tokens_computed", "Tokens that went through the model"),
    "tokens_generated": ("tokens_generated", "Tokens that requests received"),
    "tokens_admitted": ("tokens_admitted", "Tokens of requests when they were admitted"),
    "tokens_reused": ("tokens_reused", "Those of them that were found computed"),
}
LAST_STEP = {
    "requests_scheduled": "Requests that the last step served",
    "requests_context": "Those of them of which it computed a part of their prompt",
    "requests_generating": "Those of them of which it computed the token they had generated last",
    "context_tokens": "Tokens of prompts that the last step computed",
    "empty_slots": "Places of a static batch whose request has ended",
    "predicted_step_seconds": "What the steps before the last one let expect of it",
}
TIMES = {
    "step": "A step",
    "queue": "From submission to the first step of a request",
    "first_token": "From submission to the first token",
    "between_tokens": "Between two tokens of a request, its average",
    "request": "From submission to the end",
}


class EngineMetrics(Collector):
    """A registry that follows an engine: `prometheus_client.generate_latest(metrics.registry)` is its text.

    What the engine is and has done is read from it when it is asked for. What a step or a request was is noted after
    each step, in the thread that ran it.
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
        self._before = engine.stats()
        self._closed: EngineStats | None = None
        self.registry.register(self)
        self._last_step = {
            name: Gauge(f"selective_{name}", text, registry=self.registry) for name, text in LAST_STEP.items()
        }
        self._seconds = {
            name: Histogram(f"selective_{name}_seconds", text, registry=self.registry, buckets=SECONDS)
            for name, text in TIMES.items()
        }
        engine.add_observer(self._observe)

    def close(self) -> None:
        """Follow the engine no more: all stays as it is now."""
        self._closed = self._engine.stats()
        self._engine.remove_observer(self._observe)

    def collect(self) -> Iterator[Metric]:
        stats, before = self._closed or self._engine.stats(), self._before
        for name, (title, text) in NOW.items():
            yield GaugeMetricFamily(f"selective_{title}", text, value=getattr(stats, name))
        for name, (title, text) in SINCE.items():
            value = getattr(stats, name) - getattr(before, name)
            yield CounterMetricFamily(f"selective_{title}", text, value=value)
        ends = CounterMetricFamily("selective_requests", "Requests that ended, by how", labels=["finish_reason"])
        for reason, count in stats.ended.items():
            if count > before.ended.get(reason, 0):
                ends.add_metric([reason], count - before.ended.get(reason, 0))
        yield ends

    def _observe(self, record: StepRecord) -> None:
        values: dict[str, float | None] = {
            "requests_scheduled": len(record.served),
            "requests_context": len(record.in_context),
            "requests_generating": len(record.served - record.in_context),
            "context_tokens": record.context_tokens,
            "empty_slots": record.empty_slots,
            "predicted_step_seconds": record.predicted_seconds,
        }
        for name, value in values.items():
            if value is not None:
                self._last_step[name].set(value)
        if record.error is None:
            self._seconds["step"].observe(record.seconds)
        for end in record.ended:
            self._count(end)

    def _count(self, end: RequestEnd) -> None:
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
