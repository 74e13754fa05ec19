"""The one file that knows Prometheus. Owners keep plain numbers and expose `stats()`; a `Metrics` reads them when
it is scraped, so that counting costs nothing on a hot path."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 13, 20, 40, 80)
TOKEN_LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 5)

Stats = Mapping[str, float]


class _StatsCollector(Collector):
    """Turns an owner's snapshot into metrics at scrape time."""

    def __init__(
        self, prefix: str, read: Callable[[], Any], counters: frozenset[str], labels: Mapping[str, str]
    ) -> None:
        self._prefix, self._read, self._counters, self._labels = prefix, read, counters, labels

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        for name, value in _as_mapping(self._read()).items():
            family = CounterMetricFamily if name in self._counters else GaugeMetricFamily
            metric = family(f"{self._prefix}_{name}", name.replace("_", " "), labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), float(value))
            yield metric

    def describe(self) -> Iterable[Any]:
        return []


def _as_mapping(snapshot: Any) -> dict[str, float]:
    """Numbers of a stats dataclass or mapping; nested mappings are flattened by one level."""
    is_record = dataclasses.is_dataclass(snapshot)
    raw: dict[str, Any] = dataclasses.asdict(cast(Any, snapshot)) if is_record else dict(snapshot)
    flat: dict[str, float] = {}
    for name, value in raw.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}_{key}" if name != "extra" else key: inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


class Metrics:
    """A service's metrics, all under `baton_<service>_`, each with the process's labels."""

    def __init__(self, service: str, **labels: str) -> None:
        self._prefix = f"baton_{service}"
        self._labels = labels
        self._registry = CollectorRegistry()

    def stats(self, read: Callable[[], Any], counters: Sequence[str] = (), part: str = "") -> None:
        """Export an owner's snapshot. Fields named in `counters` only grow; the rest are gauges."""
        prefix = f"{self._prefix}_{part}" if part else self._prefix
        self._registry.register(_StatsCollector(prefix, read, frozenset(counters), self._labels))

    def histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Callable[[float], None]:
        """A histogram; the returned function observes one value."""
        metric = Histogram(
            f"{self._prefix}_{name}", help_text, list(self._labels), registry=self._registry, buckets=buckets
        )
        return (metric.labels(*self._labels.values()) if self._labels else metric).observe

    def counter(self, name: str, help_text: str, *label_names: str) -> Callable[..., None]:
        """A counter; the returned function adds 1 under its label values (or `amount`)."""
        names = [*self._labels, *label_names]
        metric = PrometheusCounter(f"{self._prefix}_{name}", help_text, names, registry=self._registry)

        def add(*values: str, amount: float = 1) -> None:
            child = metric.labels(*self._labels.values(), *values) if names else metric
            child.inc(amount)

        return add

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)
