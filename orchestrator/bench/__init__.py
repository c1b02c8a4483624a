"""Measuring engines and comparing them: `measure` gives figures, `compare` an answer.

Both return frozen values (`values`), the same that ``--json`` holds. The method and its reasons are in
docs/explanation/measuring.md. The parts, from the wire up:

    http1, exchange        one request on a connection opened ahead; stamps at the read
    rounds, samples        closed and open loop; stamps to samples to a round's statistics
    workload, prompts      presets; prompts of exact length
    arms, target           from words to engines that answer
    gate, server_view      what may count; the engine's own figures
    statistics, decide     from rounds to answers; pure
    session                one round with everything watched around it
    declared, comparing    what is decided beforehand, and the way from there to an answer
    selftest, paced        innocence of the client
    measure, compare       the two ways through all of this
    text, frames           tables, Markdown, JSON, pandas
    history, history_file  what was measured before
    against, ranksum, history_text   a run against an earlier one
"""

from __future__ import annotations

from orchestrator.bench.compare import compare
from orchestrator.bench.frames import from_json, to_frame, to_json
from orchestrator.bench.measure import measure
from orchestrator.bench.values import Comparison, Measurement, Workload

__all__ = ["Comparison", "Measurement", "Workload", "compare", "from_json", "measure", "to_frame", "to_json"]
