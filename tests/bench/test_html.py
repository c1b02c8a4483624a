"""The page of a report: its structure, its numbers, and that nothing written by others can do harm."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from orchestrator.bench.html import page
from orchestrator.bench.html.markup import shown, tag
from orchestrator.bench.html.words import verdict
from orchestrator.bench.text import figure, markdown
from orchestrator.bench.values import Comparison, Measurement
from orchestrator.errors import Incomparable
from tests.bench import reports

EMPTY = {"meta", "br"}
KNOWN = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "article", "footer", "h1",
    "h2", "h3", "p", "ul", "li", "dl", "div", "dt", "dd", "b", "i", "bdi", "code", "pre", "figure",
    "figcaption", "details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td",
    "svg", "desc", "text", "line", "rect", "circle", "path",
}  # fmt: skip
SITUATIONS = reports.situations()


class Parsed(HTMLParser):
    """A page taken apart; a tag that is not closed, or closed twice, is a failure."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[tuple[tuple[str, ...], str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((tuple(self.open), data))

    def within(self, tag: str) -> str:
        """Return the text within elements of this name."""
        return " ".join(data for path, data in self.words if tag in path)

    def ids(self) -> list[str]:
        return [value for _, name, value in self.attributes if name == "id"]


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_situation_has_a_whole_page_good(name: str) -> None:
    report = SITUATIONS[name]
    text = page(report)
    found = Parsed(text)
    assert text.startswith("<!doctype html>\n")
    assert set(found.tags) <= KNOWN
    assert found.tags["h1"] == found.tags["main"] == found.tags["style"] == 1
    assert ("html", "lang", "en-GB") in found.attributes
    assert len(set(found.ids())) == len(found.ids())
    referred = [
        key
        for _, name, value in found.attributes
        if name in ("aria-labelledby", "aria-describedby")
        for key in value.split()
    ]
    assert set(referred) <= set(found.ids())
    assert verdict(report).headline[:20] in found.within("h1") or "\x1b" in verdict(report).headline
    assert page(report) == text


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_page_needs_nothing_else_and_may_do_nothing_good(name: str) -> None:
    text = page(SITUATIONS[name])
    found = Parsed(text)
    names = {name for _, name, _ in found.attributes}
    assert not names & {"src", "href", "srcset", "style", "action", "xlink:href"}
    assert not [name for name in names if name.startswith("on")]
    css = found.within("style")
    assert "url(" not in css
    assert "@import" not in css
    (policy,) = [
        element["content"]
        for tag, element in found.elements
        if tag == "meta" and element.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_plot_says_what_it_shows_and_has_its_numbers_good(name: str) -> None:
    found = Parsed(page(SITUATIONS[name]))
    plots = [element for tag, element in found.elements if tag == "svg" and element.get("role") == "img"]
    assert len(plots) == found.tags["figure"] == found.tags["figcaption"]
    for plot in plots:
        assert plot["aria-labelledby"] == f"{plot['id']}-title"
        assert plot["aria-describedby"] == f"{plot['id']}-desc"
    described = [data for path, data in found.words if path[-1:] == ("desc",)]
    assert len(described) == len(plots)
    assert all(described)
    assert not re.search(
        r"\b(nan|inf|None)\b", " ".join(data for path, data in found.words if "style" not in path)
    )


def test_the_plots_of_a_comparison_good() -> None:
    report = SITUATIONS["a faster"]
    assert isinstance(report, Comparison)
    found = Parsed(page(report))
    plots = [element["id"] for tag, element in found.elements if element.get("role") == "img"]
    assert plots == ["ratio", "throughput", "ttft", "decode", "memory", "rounds"]
    numbers = found.within("td")
    first = report.decisions[0]
    for value in (*first.ratios, first.ratio, first.low, first.high):
        assert f"{value:.4f}" in found.within("details")
    for each in report.rounds:
        if not each.void:
            assert figure(each.metrics["decode_tok_s"], "tok/s") in numbers
    for each in report.rounds:
        for reason in each.void:
            assert reason in numbers
    hints = [data for path, data in found.words if path[-1:] == ("title",)]
    assert sum(hint.startswith("pair ") for hint in hints) == 8 * 7
    assert sum(", void: " in hint for hint in hints) == 2
    assert sum(re.match(r"round \d+, pair", hint) is not None for hint in hints) == 16


def test_the_plots_of_a_measurement_good() -> None:
    report = SITUATIONS["bench"]
    assert isinstance(report, Measurement)
    found = Parsed(page(report))
    plots = [element["id"] for tag, element in found.elements if element.get("role") == "img"]
    assert plots == ["throughput", "ttft", "decode", "memory", "rounds"]
    curve = next(data for path, data in found.words if path[-1:] == ("desc",) and "4 streams" in data)
    by_streams = {part.workload.concurrency: part for part in report.results if "slots" in part.workload.name}
    for streams, part in by_streams.items():
        value = next(each.value for each in part.summaries if each.metric == "output_tok_s")
        assert f"{streams} stream" in curve
        assert f"{value:.1f} tok/s" in curve
    assert "fewer than 8 tokens are left out" in found.within("figcaption")  # those of `ttft`


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a faster", "llama-server is 23.7 % faster than vllm-cpu"),
        ("b faster", "vllm-cpu is 4.04 times as fast as llama-server"),
        ("equivalent", "are equivalent within 3 %"),
        ("inconclusive", "more pairs are needed"),
        ("control", "both arms are the same, and no difference is claimed"),
        ("withheld", "may explain ratios up to 1.45: it is not claimed"),
        ("too few pairs", "Six pairs are the fewest"),
        ("no round counts", "no pair of rounds counts"),
        ("no round at all", "before a pair was complete"),
        ("bench", "gemma: decode rate 70.1 tok/s"),
        ("bench, none counts", "Of 30 rounds none counts"),
        ("bench, nothing", "It was interrupted"),
        ("refused", "a has 64 prompt tokens where b has 63"),
        ("refused", "both arms must serve the same model"),
    ],
)
def test_the_verdict_comes_first_and_in_words_good(name: str, said: str) -> None:
    words = Parsed(page(SITUATIONS[name])).within("header")
    assert said in words


def test_vram_is_drawn_where_there_is_any_good() -> None:
    with_gpu = Parsed(page(SITUATIONS["three arms"]))
    assert "VRAM 3.00 GiB" in with_gpu.within("text")
    assert "VRAM" not in Parsed(page(SITUATIONS["a faster"])).within("text")
    assert "memory" not in Parsed(page(SITUATIONS["not ours"])).ids()


def test_slots_that_vary_are_what_throughput_is_drawn_against_good() -> None:
    curve = Parsed(page(SITUATIONS["three arms"])).within("desc")
    assert re.search(r"1 slots: [\d.]+ tok/s; 2 slots: [\d.]+ tok/s; 4 slots: [\d.]+ tok/s", curve)


def test_text_of_others_stays_text_ugly() -> None:
    text = page(reports.hostile())
    found = Parsed(text)
    assert set(found.tags) <= KNOWN
    assert found.tags["script"] == found.tags["img"] == 0
    assert "\x1b" not in text
    assert "\u202e" not in text  # it would turn what follows around
    everything = " ".join(data for _, data in found.words)
    assert everything.count(shown(reports.HOSTILE)) > 40  # it is all there, to be read
    assert found.within("style").count("{") == Parsed(page(SITUATIONS["bench"])).within("style").count("{")


def test_an_attribute_is_escaped_too_ugly() -> None:
    made = Parsed(tag("p", "x", title=reports.HOSTILE))
    assert made.elements == [("p", {"title": shown(reports.HOSTILE)})]


def test_markdown_takes_text_of_others_as_text_ugly() -> None:
    for report in (reports.hostile(), Incomparable([reports.HOSTILE], advice=reports.HOSTILE)):
        said = markdown(report)
        assert not re.search(r"(?<!\\)<\w", said)
        assert not re.search(r"(?<!\\)<[!/]", said)
        assert "\x1b" not in said
    assert "Not comparable" in markdown(Incomparable(["x"]))


def test_a_page_can_be_kept_as_utf_8_ugly(tmp_path: Path) -> None:
    """A name that is no text (a file's, in another encoding) must not keep the page from being written."""
    found = reports.comparison(names=("a\udcff", "b"), voids=0)
    (tmp_path / "page.html").write_text(page(found), encoding="utf-8")
    assert "\\udcff" in (tmp_path / "page.html").read_text(encoding="utf-8")


# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes (2009), severity 1.0, on linear RGB
SEEN_BY = {
    "everybody": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopes": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)
    ),
    "deuteranopes": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)
    ),
    "tritanopes": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)
    ),
}  # fmt: skip


def seen(colour: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """Return a colour in CIE L*a*b* (D65) as it is seen."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    r, g, b = (min(1.0, max(0.0, sum(map(float.__mul__, row, linear)))) for row in matrix)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("eyes", SEEN_BY)
def test_arms_can_be_told_apart_by_every_kind_of_eye_good(eyes: str) -> None:
    css = Parsed(page(SITUATIONS["bench"])).within("style")
    found = re.findall(r"--arm(\d): (#[0-9a-f]{6})", css)
    light, dark = found[:6], found[6:]
    assert [number for number, _ in light] == [number for number, _ in dark] == list("012345")
    for scheme in (light, dark):
        places = [seen(colour, SEEN_BY[eyes]) for _, colour in scheme]
        assert min(math.dist(a, b) for a, b in itertools.combinations(places, 2)) > 20
        assert math.dist(*places[:2]) > 60  # two arms are what is compared most
