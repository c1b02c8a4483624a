"""What one YAML scalar means: where YAML 1.1 and 1.2 disagree, and how ``${VAR}`` is filled in.

Editors, Python's yaml and other tools read a few plain scalars differently (``no``, ``010``, ``1:30``,
``1e3``, dates). A profile must mean the same to all of them, so such a scalar is a fault, except for the
words ``on``, ``off``, ``yes`` and ``no`` where the key can only mean one thing by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import yaml

Scalar: TypeAlias = str | int | float | bool | None

FREE_TEXT: Final = "text"
"""Stands for a word such as ``no`` in a first reading: where any text will do, the word is a trap."""

MAX_NUMBER: Final = 64
"""Characters of a number; anything longer is text."""

_INT = re.compile(r"[-+]?[0-9]+")
_PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = ("", "~", "null", "Null", "NULL")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_RESOLVER: Any = yaml.resolver.Resolver()
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|\$\{")


class ScalarError(ValueError):
    """The scalar can't be used; the message says why, without a place."""


def shown(text: str, limit: int = 60) -> str:
    """Return `text` fit for one line of a message: control characters escaped, shortened."""
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return printable if len(printable) <= limit else printable[: limit - 3] + "..."


def core(text: str) -> Scalar:
    """Read a plain scalar as YAML 1.2's core schema does (https://yaml.org/spec/1.2.2/, section 10.3.2)."""
    if text in _NULLS:
        return None
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > MAX_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text)
    if _PREFIXED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float("nan")
    return text


def legacy(text: str) -> Scalar:
    """Read a plain scalar as YAML 1.1 does; a date is given as the text ``a date``."""
    if len(text) > MAX_NUMBER:
        return text
    tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))
    kind = tag.rpartition(":")[2]
    if kind == "timestamp":
        return "a date"
    if kind not in {"bool", "int", "float", "null"}:
        return text
    try:
        value: Scalar = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):  # such as the sexagesimal 1:_
        return text
    return value


def _described(value: Scalar) -> str:
    return "text" if isinstance(value, str) and value != "a date" else str(value)


def readings(text: str) -> tuple[Scalar, ...]:
    """Return what a plain scalar may mean, most likely first.

    Raises:
        ScalarError: it means different things to different readers, or nothing.

    """
    now, then = core(text), legacy(text)
    if now is None:
        raise ScalarError("has no value; give it one, or leave the key out")
    if isinstance(now, str) and isinstance(then, bool):
        return (FREE_TEXT, text, then)
    if isinstance(now, float) and not float("-inf") < now < float("inf"):
        raise ScalarError(f"{text} is not a finite number")
    if (type(now), now) != (type(then), then):
        numbers = [v for v in dict.fromkeys((then, now)) if isinstance(v, int | float)]
        plain = " or ".join(f"{number:g}" if isinstance(number, float) else str(number) for number in numbers)
        raise ScalarError(
            f"{shown(text)} is {_described(then)} to some YAML readers and {_described(now)} to others; "
            + (f"write {plain}, or " if plain else "")
            + "put it in quotes"
        )
    return (now,)


def filled_readings(text: str) -> tuple[Scalar, ...]:
    """Return what a scalar may mean into which variables were filled: text if text will do, else a number."""
    number = core(text)
    word = legacy(text)
    others = [value for value in (number, word) if isinstance(value, bool | int | float)]
    return (text, *others[:1])


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Fill in ``${VAR}`` and ``${VAR:-default}`` (also when VAR is empty); ``$$`` stands for ``$``.

    Raises:
        ScalarError: a variable without a default is not set, or ``${`` is not one of these forms.

    """

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if match[0] == "$$":
            return "$"
        if name is None:
            raise ScalarError("${ must be ${VAR} or ${VAR:-default}; write $${ for the text itself")
        if default is not None:
            return environ.get(name) or default
        if name not in environ:
            raise ScalarError(f"${{{name}}} is not set; export it, or write ${{{name}:-default}}")
        return environ[name]

    return _VARIABLE.sub(value, text)


def check_text(text: str) -> None:
    """Refuse characters that no program can be given.

    Raises:
        ScalarError: there is a NUL or half of a surrogate pair in it.

    """
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
        raise ScalarError("holds a character that can't be used (NUL or half of a surrogate pair)")
