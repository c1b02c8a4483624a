"""A report as one HTML page that needs nothing else: no script, no font, no network.

    markup      elements; what is not markup is escaped
    view        the rounds of a report in groups
    words       the verdict
    svg         axes, marks, scales
    ratio, plots, timeline   the figures, each with its numbers as a table
    sections    gate, void rounds, method, arms, machine, client
    style.css   light, dark, print; telephone to desk

`page` is pure: the same report gives the same page.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from orchestrator.bench.html import plots, ratio, sections, timeline, words
from orchestrator.bench.html.markup import Child, Markup, name_of, tag
from orchestrator.bench.html.view import groups
from orchestrator.bench.html.words import Report, Verdict
from orchestrator.bench.values import Comparison, Measurement
from orchestrator.errors import Incomparable

__all__ = ["Report", "page"]


def page(report: Report) -> str:
    """Return the page of a result, or of a comparison that was refused.

    It may hold what others wrote (names of models, lines of logs): all of it is text, and the page's policy
    forbids scripts, and everything from elsewhere.
    """
    verdict = words.verdict(report)
    body = [_hero(report, verdict)]
    body += sections.refusal(report) if isinstance(report, Incomparable) else _results(report)
    return _document(verdict.headline, body)


def _results(report: Measurement | Comparison) -> list[Markup]:
    found = groups(report)
    drawn: list[Child] = [
        ratio.ratio(report) if isinstance(report, Comparison) else None,
        plots.throughput(found),
        plots.distribution("ttft", "Time to first token", "ttft_s", found),
        plots.distribution("decode", "Decode rate", "decode_tok_s", found),
        plots.memory(found),
        timeline.rounds(found),
    ]
    how = [sections.method(report), sections.machine(report.machine), sections.client(report.self_test)]
    return [
        part
        for part in (
            sections.notes(report.notes),
            sections.section("Plots", tag("div", drawn, class_="plots")) if any(drawn) else None,
            sections.figures(report),
            sections.gate(report, found),
            sections.voids(found),
            sections.arms(report, found),
            *how,
            tag("footer", f"Every sample is in the JSON ({report.format}). Orchestrator {report.version}."),
        )
        if part is not None
    ]


def _hero(report: Report, verdict: Verdict) -> Markup:
    origin = ["orchestrator"]
    if not isinstance(report, Incomparable):
        origin = [f"orchestrator {report.kind}", sections.moment(report.started_at)]
    legend = None
    if isinstance(report, Comparison):
        legend = tag(
            "ul", [_key(group.letter, group.name, group.style) for group in groups(report)], class_="key"
        )
    tiles = [
        tag("div", tag("dt", what), tag("dd", value), tag("dd", sure, class_="sure"), class_="tile")
        for what, value, sure in verdict.tiles
    ]
    return tag(
        "header",
        tag("p", " · ".join(origin), class_="origin"),
        tag("p", verdict.stamp, class_="stamp"),
        tag("h1", verdict.headline),
        tag("p", words.subtitle(report), class_="subtitle"),
        tag("dl", tiles, class_="tiles") if tiles else None,
        tag("ul", [tag("li", reason) for reason in verdict.reasons], class_="reasons"),
        legend,
        class_=f"hero {verdict.kind}",
    )


def _key(letter: str, name: str, style: int) -> Markup:
    from orchestrator.bench.html import svg

    sample = tag("svg", svg.mark("8", 8, style, "mark", letter), width="16", height="16", aria_hidden="true")
    return tag("li", sample, tag("b", letter), " ", name_of(name))


def _document(title: str, body: list[Markup]) -> str:
    css = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("meta", name_="referrer", content="no-referrer"),
        tag("title", title),
        Markup(f"<style>{css}</style>"),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', body)), lang='en-GB')}\n"
