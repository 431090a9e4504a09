"""Prometheus metrics of one app, in a separate registry; nothing in them comes from prompts or keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tritium.serve.engine import LAST, Cancelled, Done, Engine, Event, Job, Started

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Counters and histograms that requests and jobs update, and gauges that are read from the engine."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_State(engine))
        self.requests = self._counter("tritium_requests", "HTTP requests", "route", "status")
        self.errors = self._counter("tritium_errors", "Requests that ended with an error", "code")
        self._cancelled = self._counter("tritium_cancelled", "Jobs that were stopped", "why")
        self._images = self._counter("tritium_images", "Images and videos that were made", "model", "kind")
        self._request = self._histogram(
            "tritium_request_seconds", "Seconds from submission to the end", _SECONDS, "kind"
        )
        self._queue = self._histogram("tritium_queue_seconds", "Seconds in the queue", _SECONDS)
        self._step = self._histogram(
            "tritium_step_seconds",
            "Seconds of a batch: until its first step was done (start), of a later step (step), after the last one (end)",
            _STEP_SECONDS,
            "part",
        )
        self._batch = self._histogram("tritium_batch_size", "Images of the batch in which a job ran", (1, 2, 4, 8, 16))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def watch(self, job: Job) -> Callable[[Event], None]:
        """Return a function that takes the events of a job."""
        entered = time.perf_counter()

        def take(event: Event) -> None:
            if isinstance(event, Started):
                self._queue.observe(time.perf_counter() - entered)
            if isinstance(event, LAST):
                self._request.labels(job.kind).observe(time.perf_counter() - entered)
            if isinstance(event, Cancelled):
                self._cancelled.labels(event.why).inc()
            if isinstance(event, Done):
                self._images.labels(job.model, job.kind).inc(len(event.images))
                self._batch.observe(event.facts.get("batched", 1))
                for part, seconds in event.facts.get("parts", {}).items():
                    self._step.labels(part).observe(seconds)

        return take

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _State(Collector):
    """What the engine counts, read when metrics are collected."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        counts = status.counts
        gauges = {
            "tritium_ready": ("1 while requests are accepted", int(status.ready)),
            "tritium_queue_length": ("Images that wait", status.queued),
            "tritium_queue_work_seconds": ("Estimated seconds of the images that wait", status.queued_seconds),
            "tritium_running": ("Images that run", status.running),
            "tritium_captures": ("Static graphs that are kept", counts.captures),
            "tritium_gpu_bytes": ("Bytes of device memory that are allocated", counts.device_bytes),
        }
        counters = {
            "tritium_recompiles": ("Compilations after warm-up", counts.recompiles),
            "tritium_violations": ("Calls outside of the shape contract", counts.violations),
            "tritium_worker_restarts": ("Workers that ended and were started again", counts.restarts),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
