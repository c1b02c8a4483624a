"""The page of a report in a real browser: nothing is asked for, nothing overflows, everything can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench.html import page
from tests import browser
from tests.bench import reports
from tests.browser import Browser, Page

SITUATIONS = reports.situations()
TELEPHONE, DESK = 360, 1400

LOOK = (Path(__file__).parent / "look.js").read_text()
SIDEWAYS = """[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of this module."""
    with Browser(browser.required(), tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of every situation."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, report in SITUATIONS.items():
        found[name] = folder / f"{re.sub('[^a-z]+', '-', name)}.html"
        found[name].write_text(page(report), encoding="utf-8")
    return found


def opened(chromium: Browser, path: Path, width: int, scheme: str, *, unfolded: bool = True) -> Page:
    found = chromium.open(path, width, scheme)
    if unfolded:
        found.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    return found


def look(shown: Page, what: str) -> list[Any]:
    """Return what a function of look.js finds."""
    return shown.evaluate(f"(() => {{ {LOOK} return {what}(); }})()")


@pytest.mark.parametrize("width", [TELEPHONE, DESK])
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_page_can_be_read_by_everybody_good(
    chromium: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    shown = opened(chromium, pages[name], width, "light")
    assert shown.complaints() == []
    assert shown.requests() == [pages[name].as_uri()]
    document, body, window = shown.evaluate(SIDEWAYS)
    assert max(document, body) <= window == width
    for plot in look(shown, "plots"):
        assert plot["width"] > 200
        assert plot["height"] >= 50
        assert plot["marks"] > 1, plot
        assert not plot["lost"], plot
        assert plot["outside"] == [], plot["id"]
        assert plot["overlapping"] == [], plot["id"]
    for scheme in ("light", "dark"):
        shown.prefer(scheme)
        texts = look(shown, "texts")
        assert len(texts) > 5
        assert [text for text in texts if text[1] < text[2]] == [], scheme
        assert [mark for mark in look(shown, "marks") if mark[1] < 3] == [], scheme
    assert shown.complaints() == []
    shown.close()


def test_light_and_dark_are_what_they_say_good(chromium: Browser, pages: dict[str, Path]) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        shown = opened(chromium, pages["bench"], DESK, scheme)
        colours[scheme] = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        shown.close()
    light, dark = (sum(map(int, re.findall(r"\d+", colours[scheme]))) for scheme in ("light", "dark"))
    assert light > 600
    assert dark < 150


def test_print_is_on_white_with_every_number_good(chromium: Browser, pages: dict[str, Path]) -> None:
    paper = 688  # pixels within the margins of A4
    shown = chromium.open(pages["a faster"], paper, "dark", media="print")
    assert max(shown.evaluate(SIDEWAYS)) == paper
    for element in ("body", "figure", ".hero"):
        white = shown.evaluate(f"getComputedStyle(document.querySelector('{element}')).backgroundColor")
        assert white == "rgb(255, 255, 255)", element
    assert [text for text in look(shown, "texts") if text[1] < text[2]] == []
    closed, seen = shown.evaluate(
        "[[...document.querySelectorAll('details')].filter(e => !e.open).length,"
        " [...document.querySelectorAll('details table, details pre')]"
        ".filter(e => e.getBoundingClientRect().height > 10 && e.checkVisibility()).length]"
    )
    assert closed > 5
    assert seen >= closed
    shown.close()


def test_a_hostile_name_runs_nothing_ugly(chromium: Browser, pages: dict[str, Path]) -> None:
    shown = opened(chromium, pages["hostile"], DESK, "light")
    assert shown.evaluate("document.scripts.length + document.images.length") == 0
    assert shown.evaluate("document.querySelector('h1').textContent").count("<script>alert(1)</script>") == 2
    shown.close()


def test_the_policy_forbids_what_a_page_does_not_have_bad(chromium: Browser, tmp_path: Path) -> None:
    """Were a hole in the escaping, the browser would still run and fetch nothing."""
    text = page(SITUATIONS["bench"])
    planted = (
        '<script>window.harmed = 1</script><img src="http://127.0.0.1:9/x.png" onerror="window.harmed = 2">'
    )
    path = tmp_path / "planted.html"
    path.write_text(
        text.replace("<main>", f"<main>{planted}<p style='color: red' id='p'>x</p>"), encoding="utf-8"
    )
    shown = chromium.open(path)
    assert shown.evaluate("window.harmed ?? null") is None
    assert shown.evaluate("getComputedStyle(document.getElementById('p')).color") != "rgb(255, 0, 0)"
    assert any("Content Security Policy" in complaint for complaint in shown.complaints())
    shown.close()


def test_what_scrolls_can_be_reached_with_the_keyboard_good(
    chromium: Browser, pages: dict[str, Path]
) -> None:
    shown = opened(chromium, pages["three arms"], TELEPHONE, "light")
    stuck = shown.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => e.scrollWidth > e.clientWidth + 1"
        " && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.tabIndex < 0).length"
    )
    assert stuck == 0
    shown.close()
