"""Elements of a page, safe by construction: what is not `Markup` is text, and text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is HTML already; only `tag` and `join` make it."""

    __slots__ = ()


Child = str | int | None | Iterable[Any]


def shown(text: str) -> str:
    """Return a text that anybody may have written, fit to be read: control characters as their codes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else f"\\u{ord(character):04x}"
        for character in text
    )


def join(*children: Child) -> Markup:
    """Return children one after the other; None is nothing, lists are laid flat."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str | int):
            parts.append(escape(shown(str(child)), quote=False))
        else:
            parts.append(join(*child))
    return Markup("".join(parts))


def tag(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Return an element; ``class_`` is class, an underscore within a name a hyphen, None no attribute."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(shown(_text(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(*children)}</{name}>")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def name_of(text: str) -> Markup:
    """Return a name from outside: its direction of writing is its own affair."""
    return tag("bdi", text)


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Child]], words: int = 1) -> Markup:
    """Return a table that scrolls by itself where it is too wide; its first `words` columns are text."""

    def cell(name: str, column: int, child: Child, scope: str | None = None) -> Markup:
        return tag(name, child, scope=scope, class_=None if column < words else "number")

    head = [cell("th", column, text, "col") for column, text in enumerate(headings)]
    body = [
        tag(
            "tr",
            [
                cell("td" if column else "th", column, child, None if column else "row")
                for column, child in enumerate(row)
            ],
        )
        for row in rows
    ]
    made = tag("table", tag("caption", caption), tag("thead", tag("tr", head)), tag("tbody", body))
    return tag("div", made, class_="scroll", role="region", aria_label=caption, tabindex="0")


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Return a list of terms with what they are; those that are None are left out."""
    items = [tag("div", tag("dt", term), tag("dd", what)) for term, what in pairs if what is not None]
    return tag("dl", items)


def more(summary: str, *children: Child) -> Markup:
    """Return what is shown when it is asked for, and in print."""
    return tag("details", tag("summary", summary), children)
