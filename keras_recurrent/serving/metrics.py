"""Metrics of the server in the format of Prometheus."""

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX = "keras_recurrent_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1),
)
# {key of `Engine.stats()`: (name, description)}
GAUGES = {
    "queued": ("requests_queued", "Requests that wait for a slot"),
    "active": ("slots_active", "Slots with a request"),
    "num_slots": ("slots", "Slots"),
}
COUNTERS = {
    "tokens": ("tokens", "Generated tokens"),
    "prefix_hits": ("prefix_hits", "Requests that started from a saved prefix"),
    "prefix_tokens": ("prefix_tokens", "Prompt tokens that a saved prefix replaced"),
}


class Metrics:
    """Metrics of one server and its engine, in a separate registry."""

    def __init__(self, engine):
        self._engine, self._before = engine, engine.stats()
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self.responses = prometheus_client.Counter(
            f"{PREFIX}responses", "HTTP responses of /v1", ["status"], registry=self._registry
        )
        self._ends = prometheus_client.Counter(
            f"{PREFIX}requests", "Ended requests", ["finish_reason"], registry=self._registry
        )
        self._first = prometheus_client.Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "Time from the arrival of a request to its first token",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.token_seconds = prometheus_client.Histogram(
            f"{PREFIX}inter_token_seconds",
            "Time between tokens of a request",
            buckets=TOKEN_SECONDS,
            registry=self._registry,
        )

    def collect(self):
        """Yields the metrics of the engine; called by the registry."""
        stats = self._engine.stats()
        for key, (name, description) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, description, value=stats[key])
        for key, (name, description) in COUNTERS.items():
            value = stats[key] - self._before[key]  # since the server started
            yield CounterMetricFamily(PREFIX + name, description, value=value)

    def end(self, request):
        """Records the end of an `EngineRequest`; the reason is "error" if the engine failed."""
        reason = request.finish_reason or "error"
        self._ends.labels(reason).inc()
        if reason != "error" and (seconds := request.result().time_to_first_token) is not None:
            self._first.observe(seconds)

    def text(self):
        """Returns the metrics in the text format."""
        return prometheus_client.generate_latest(self._registry)
