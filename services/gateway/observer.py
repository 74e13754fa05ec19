"""What the gateway measures: the client's view of latency, and how requests end."""

from typing import Literal

from services.gateway.ports import RequestSummary
from shared.metrics import LATENCY_BUCKETS_S, TOKEN_LATENCY_BUCKETS_S, Metrics


class PrometheusObserver:
    """Implements `services.gateway.ports.Observer`. Seconds everywhere."""

    def __init__(self, metrics: Metrics) -> None:
        self._ttft = metrics.histogram("ttft_seconds", "Arrival to first token out", LATENCY_BUCKETS_S)
        self._itl = metrics.histogram("itl_seconds", "Gap between two tokens", TOKEN_LATENCY_BUCKETS_S)
        self._tpot = metrics.histogram("tpot_seconds", "(last - first) / (n - 1)", TOKEN_LATENCY_BUCKETS_S)
        self._e2e = metrics.histogram("e2e_seconds", "Arrival to the end", LATENCY_BUCKETS_S)
        self._admit = metrics.histogram("admit_seconds", "Arrival to admission", TOKEN_LATENCY_BUCKETS_S)
        self._prompt = metrics.counter("prompt_tokens_total", "Prompt tokens admitted")
        self._cached = metrics.counter("cached_prompt_tokens_total", "Prompt tokens nobody had to compute")
        self._output = metrics.counter("generated_tokens_total", "Tokens generated for clients")
        self._finished = metrics.counter("requests_total", "Requests by how they ended", "reason")
        self._refused = metrics.counter("refused_total", "Requests answered with an error", "status", "code")
        self._dropped = metrics.counter("dropped_events_total", "Events thrown away", "kind")
        self._repaired = metrics.counter("repaired_tokens_total", "Tokens taken from the log to close a gap")

    def refused(self, status: int, code: str) -> None:
        self._refused(str(status), code)

    def admitted(self, num_prompt_tokens: int) -> None:
        self._prompt(amount=num_prompt_tokens)

    def first_token(self, ttft_s: float) -> None:
        self._ttft(ttft_s)

    def more_tokens(self, gap_s: float, num_tokens: int) -> None:
        self._itl(gap_s)

    def dropped(self, kind: Literal["stale", "repeat"]) -> None:
        self._dropped(kind)

    def gap_repaired(self, num_tokens: int) -> None:
        self._repaired(amount=num_tokens)

    def finished(self, summary: RequestSummary) -> None:
        self._finished(summary.reason)
        self._e2e(summary.e2e_s)
        self._admit(summary.admit_s)
        self._output(amount=summary.num_output_tokens)
        self._cached(amount=summary.num_cached_tokens)
        if summary.tpot_s is not None:
            self._tpot(summary.tpot_s)
