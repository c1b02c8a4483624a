"""After a round: raw stamps become samples, and samples the round's statistics. No I/O.

Here, and not while it runs, the streams are parsed, with the parser that the models use.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.bench.exchange import Exchange
from orchestrator.bench.http1 import Connection
from orchestrator.bench.rounds import Run
from orchestrator.bench.statistics import median, percentile
from orchestrator.bench.values import Client, EngineFigures, Sample
from orchestrator.chunks import error_message, json_or_text
from orchestrator.errors import RequestError
from orchestrator.wire import Stream


def sample(exchange: Exchange, began_ns: int) -> Sample:
    """Parse one exchange with the shared parser and work out its figures; see `values.Sample`."""
    connection, stream = exchange.connection, Stream()

    def moment(ns: int) -> float | None:
        return (ns - began_ns) / 1e9 if ns else None

    chunks: list[float] = []
    error = exchange.error
    if connection is not None:
        for at_ns, data in connection.reads:
            before = stream.chunks
            stream.feed(data, at_ns)
            if stream.chunks != before and stream.last_ns == at_ns:
                chunks.append(round((at_ns - began_ns) / 1e9, 6))
        error = _judge(connection, stream)
    sent_ns = connection.sent_ns if connection else exchange.intended_ns
    end_ns = (connection.end_ns if connection else 0) or sent_ns
    cost, usage = stream.metrics(sent_ns, end_ns), stream.usage
    decode = cost.decode_tok_s if usage and usage.completion_tokens > 1 else None
    return Sample(
        index=exchange.index,
        intended_s=(exchange.intended_ns - began_ns) / 1e9,
        sent_s=(sent_ns - began_ns) / 1e9,
        first_s=moment(stream.first_ns),
        last_s=moment(stream.last_ns),
        end_s=(end_ns - began_ns) / 1e9,
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        finish_reason=stream.finish_reason,
        error=error,
        ttft_s=cost.ttft_s,
        decode_tok_s=decode,
        prefill_tok_s=cost.prefill_tok_s,
        tpot_s=1 / decode if decode else None,
        e2e_s=(end_ns - exchange.intended_ns) / 1e9,
        chunks_s=tuple(chunks),
        engine=_engine_figures(stream),
    )


def _judge(connection: Connection, stream: Stream) -> str | None:
    """Return why an exchange is no success, else None."""
    head = connection.head
    if head is None:
        return connection.error or "no answer"
    if head.status != 200:
        said = error_message(json_or_text(b"".join(data for _, data in connection.reads)))
        return f"HTTP {head.status}: {said}"
    if connection.error is not None and not stream.done:
        return connection.error if stream.error is None else str(stream.error)
    try:
        stream.end()
    except RequestError as fault:
        return str(fault)
    return "the server sent no usage" if stream.usage is None else None


def _engine_figures(stream: Stream) -> EngineFigures | None:
    """Return the engine's own figures; predicted_ms runs from its first token to its last."""
    timings = stream.timings
    if timings is None:
        return None
    moved = timings.predicted_n > 1 and timings.predicted_ms > 0
    return EngineFigures(
        decode_tok_s=(timings.predicted_n - 1) / timings.predicted_ms * 1000 if moved else None,
        prefill_s=timings.prompt_ms / 1000,
        cached_tokens=timings.cache_n,
    )


def client(run_: Run, samples: Sequence[Sample]) -> Client:
    """Return how busy the client was."""
    wall = max(1e-9, (run_.ended_ns - run_.began_ns) / 1e9)
    lags = run_.lags or [0.0]
    return Client(
        cpu=run_.cpu_s / wall,
        lag_p50_s=median(lags),
        lag_p99_s=percentile(lags, 0.99),
        lag_max_s=max(lags),
        events_s=sum(len(each.chunks_s) for each in samples) / wall,
    )


def metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the round's statistics over its successes; see `values.METRICS`."""
    good = [each for each in samples if each.error is None]
    found: dict[str, float] = {}
    for name in ("decode_tok_s", "ttft_s", "prefill_tok_s", "tpot_s", "e2e_s"):
        values = [value for each in good if (value := getattr(each, name)) is not None]
        if values:
            found[name] = median(values)
    gaps = [b - a for each in good for a, b in zip(each.chunks_s, each.chunks_s[1:], strict=False)]
    if gaps:
        found["chunk_gap_s"] = median(gaps)
    ends = [each.last_s for each in good if each.last_s is not None]
    if ends:
        span = max(ends) - min(each.sent_s for each in good)
        if span > 0:
            found["output_tok_s"] = sum(each.output_tokens or 0 for each in good) / span
            found["requests_s"] = len(good) / span
    return found
