"""The engine's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from selective_compile.runtime.engine import Engine
from selective_compile.runtime.stats import EngineStats, RequestEnd, StepFloor, StepObserver, StepRecord

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
    "kv_bytes": ("kv_bytes", "Bytes of the KV pools"),
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
    "last_step_seconds": "How long the last step took",
    "predicted_step_seconds": "What the steps before the last one let expect of it",
}
FLOOR = {"floor_step_seconds": "The least time that the machine could have taken for the last step"}
TIMES = {
    "step": "A step",
    "queue": "From submission to the first step of a request",
    "first_token": "From submission to the first token",
    "between_tokens": "Between two tokens of a request, its average",
    "request": "From submission to the end",
}


class EngineMetrics(Collector):
    """A registry that follows engines: `prometheus_client.generate_latest(metrics.registry)` is its text.

    What an engine is and has done is read from it when it is asked for. What a step or a request was is noted after
    each step, in the thread that ran it.
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine],
        registry: CollectorRegistry | None = None,
        *,
        floor: Callable[[StepRecord], StepFloor] | None = None,
    ) -> None:
        """Follow them from now on.

        Args:
            engines: one, or several, such as those of a `RequestProcessor`: then each sample has the label "engine",
                its place among them.
            registry: where to register the metrics; None: one of its own, `registry`.
            floor: a step's least time and limiting resource, such as a `Roofline` of `selective_compile.bench.floor`;
                None: neither is reported.

        Raises:
            ValueError: the registry has metrics of engines already, or there is something else than engines.
        """
        self.registry = registry if registry is not None else CollectorRegistry()
        single = isinstance(engines, Engine)
        if not single and not (isinstance(engines, Sequence) and all(isinstance(each, Engine) for each in engines)):
            raise ValueError(f"engines must be an Engine or a list of them, got {type(engines).__name__}")
        self._engines = (engines,) if isinstance(engines, Engine) else tuple(engines)
        self._labels = () if single else ("engine",)
        self._values = [() if single else (str(place),) for place in range(len(self._engines))]
        self._before = [engine.stats() for engine in self._engines]
        self._closed: list[EngineStats] | None = None
        self._floor = floor
        self._last_step = {name: self._gauge(name, text) for name, text in LAST_STEP.items()}
        if floor is not None:
            self._last_step |= {name: self._gauge(name, text) for name, text in FLOOR.items()}
            about = "Steps by what of the machine their least time is the time of"
            names = (*self._labels, "resource")
            self._limited = Counter("selective_limited_steps", about, names, registry=self.registry)
        self._seconds = {
            name: Histogram(f"selective_{name}_seconds", text, self._labels, registry=self.registry, buckets=SECONDS)
            for name, text in TIMES.items()
        }
        self.registry.register(self)  # after those that may be refused
        self._observers: list[StepObserver] = [partial(self._observe, values) for values in self._values]
        for engine, observer in zip(self._engines, self._observers, strict=True):
            engine.add_observer(observer)

    def close(self) -> None:
        """Follow them no more: all stays as it is now."""
        self._closed = self._closed or [engine.stats() for engine in self._engines]
        for engine, observer in zip(self._engines, self._observers, strict=False):
            engine.remove_observer(observer)
        self._observers.clear()  # they lead back here, and so to the engines, whose memory is to be freed at once
        self._engines = ()  # the registry leads back here, too

    def collect(self) -> Iterator[Metric]:
        engines = self._engines  # first: another thread may close this
        now = self._closed or [engine.stats() for engine in engines]
        for name, (title, text) in NOW.items():
            gauge = GaugeMetricFamily(f"selective_{title}", text, labels=self._labels)
            for values, stats in zip(self._values, now, strict=True):
                gauge.add_metric(values, getattr(stats, name))
            yield gauge
        for name, (title, text) in SINCE.items():
            counter = CounterMetricFamily(f"selective_{title}", text, labels=self._labels)
            for values, stats, before in zip(self._values, now, self._before, strict=True):
                counter.add_metric(values, getattr(stats, name) - getattr(before, name))
            yield counter
        labels = (*self._labels, "finish_reason")
        ends = CounterMetricFamily("selective_requests", "Requests that ended, by how", labels=labels)
        for values, stats, before in zip(self._values, now, self._before, strict=True):
            for reason, count in stats.ended.items():
                if count > before.ended.get(reason, 0):
                    ends.add_metric((*values, reason), count - before.ended.get(reason, 0))
        yield ends

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"selective_{name}", text, self._labels, registry=self.registry)

    def _observe(self, labels: tuple[str, ...], record: StepRecord) -> None:
        found: dict[str, float | None] = {
            "requests_scheduled": len(record.served),
            "requests_context": len(record.in_context),
            "requests_generating": len(record.served - record.in_context),
            "context_tokens": record.context_tokens,
            "empty_slots": record.empty_slots,
            "predicted_step_seconds": record.predicted_seconds,
        }
        if record.error is None:
            found["last_step_seconds"] = record.seconds
            _of(self._seconds["step"], labels).observe(record.seconds)
            if self._floor is not None:
                floor = self._floor(record)
                found["floor_step_seconds"] = floor.seconds
                self._limited.labels(*labels, floor.limit).inc()
        for name, value in found.items():
            if value is not None:
                _of(self._last_step[name], labels).set(value)
        for end in record.ended:
            self._count(labels, end)

    def _count(self, labels: tuple[str, ...], end: RequestEnd) -> None:
        timing = end.timing
        measured = {
            "queue": timing.queued,
            "first_token": timing.first_token,
            "between_tokens": timing.between_tokens,
            "request": timing.total,
        }
        for name, seconds in measured.items():
            if seconds is not None:
                _of(self._seconds[name], labels).observe(seconds)


Labelled = TypeVar("Labelled", Gauge, Histogram)


def _of(metric: Labelled, labels: tuple[str, ...]) -> Labelled:
    """The metric of these labels, which has no others."""
    return metric.labels(*labels) if labels else metric
