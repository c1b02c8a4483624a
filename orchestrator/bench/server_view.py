"""The engine's own figures, as an independent check of ours: ``timings`` in a stream, and ``/metrics``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import httpx

from orchestrator.backend import Endpoint
from orchestrator.bench.statistics import median
from orchestrator.bench.values import Sample, ServerView
from orchestrator.clients import sync_client

DISAGREEMENT = 0.03
_LINE = re.compile(r"^([a-z_]+:[a-z_0-9]+)(?:\{[^\n]*\})? (\S+)", re.MULTILINE)

Counters = Mapping[str, float]


def ask(endpoint: Endpoint, path: str) -> httpx.Response | None:
    """Ask a server something small; None when it does not answer with 200."""
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    try:
        with sync_client(endpoint.url) as client:
            answer = client.get(endpoint.url + path, headers=headers, timeout=5)
    except (httpx.HTTPError, ValueError):
        return None
    return answer if answer.status_code == 200 else None


def read_counters(endpoint: Endpoint) -> Counters:
    """Return the sums over all labels of the server's Prometheus metrics; empty when it has none."""
    answer = ask(endpoint, "/metrics")
    return parse_counters(answer.text) if answer is not None else {}


def parse_counters(text: str) -> Counters:
    """Return the sums over all labels of the metrics in Prometheus' text form."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return found


def views(samples: Sequence[Sample], before: Counters, after: Counters) -> tuple[ServerView, ...]:
    """Return what the engine says of a round."""
    good = [each for each in samples if each.error is None]
    found = [_timings(good), _llama_metrics(good, before, after), _vllm_metrics(good, before, after)]
    return tuple(view for view in found if view is not None)


def _timings(good: Sequence[Sample]) -> ServerView | None:
    figures = [each.engine for each in good if each.engine is not None]
    if not figures:
        return None
    pairs = [
        (each.decode_tok_s, each.engine.decode_tok_s)
        for each in good
        if each.engine is not None and each.decode_tok_s and each.engine.decode_tok_s
    ]
    return ServerView(
        source="timings of each request",
        decode_tok_s=median([its for _, its in pairs]) if pairs else None,
        ttft_s=median([each.prefill_s for each in figures]),
        disagreement=abs(median([ours / its for ours, its in pairs]) - 1) if pairs else None,
    )


def _llama_metrics(good: Sequence[Sample], before: Counters, after: Counters) -> ServerView | None:
    grown = _growth(before, after)
    tokens = grown.get("llamacpp:tokens_predicted_total")
    return None if tokens is None else _counted("/metrics of llama-server", good, round(tokens))


def _vllm_metrics(good: Sequence[Sample], before: Counters, after: Counters) -> ServerView | None:
    grown = _growth(before, after)
    tokens = grown.get("vllm:generation_tokens_total")
    if tokens is None:
        return None
    counted = _counted("/metrics of vLLM", good, round(tokens))
    # each request's mean over its tokens; the older name is a mean over all tokens
    names = ("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds")
    tpot = next((mean for name in names if (mean := _mean(grown, name))), None)
    ours = [each.tpot_s for each in good if each.tpot_s is not None]
    differing = abs(sum(ours) / len(ours) / tpot - 1) if ours and tpot else counted.disagreement
    return ServerView(
        source=counted.source,
        decode_tok_s=1 / tpot if tpot else None,
        ttft_s=_mean(grown, "vllm:time_to_first_token_seconds"),
        output_tokens=counted.output_tokens,
        disagreement=max(differing or 0.0, counted.disagreement or 0.0),
    )


def _counted(source: str, good: Sequence[Sample], tokens: int) -> ServerView:
    ours = sum(each.output_tokens or 0 for each in good)
    return ServerView(
        source=source, output_tokens=tokens, disagreement=abs(ours / tokens - 1) if tokens else None
    )


def _growth(before: Counters, after: Counters) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _mean(grown: Counters, name: str) -> float | None:
    count = grown.get(f"{name}_count", 0)
    return grown[f"{name}_sum"] / count if count and f"{name}_sum" in grown else None
