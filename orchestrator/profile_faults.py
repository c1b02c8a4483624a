"""From a tree of nodes to a pydantic model, and from pydantic's complaints to ours, each at its place."""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from orchestrator.errors import Problem
from orchestrator.profile_schema import ENV_NAME_PATTERN, NAME_PATTERN, known_keys, place_of
from orchestrator.yaml_scalars import FREE_TEXT, Scalar, shown
from orchestrator.yaml_tree import Node, Steps, dotted

Model = TypeVar("Model", bound=BaseModel)

TEXT_KEYS: Final = frozenset({"args", "command", "container", "stop_command", "env"})
"""Where a number is taken as the text it is, if it can be written in one way only."""

_RANGES: Final[dict[str, tuple[str, str]]] = {
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
    "greater_than": ("more than", "gt"),
    "less_than": ("less than", "lt"),
}
_TYPES: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_MEANT: Final = {"gpu": "auto", "amd": "rocm", "nvidia": "cuda"}  # what looks like another choice, or none
_PATTERNS: Final = {
    NAME_PATTERN: "must be letters, digits, '.', '_' and '-', at most 64, the first a letter or a digit",
    ENV_NAME_PATTERN: "can't be a variable's name; use letters, digits and '_'",
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` when something known looks like `word`, else nothing."""
    candidates = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), candidates, n=1)
    return f"; did you mean {candidates[close[0]]}?" if close else ""


def validate(
    model: type[Model],
    root: Node,
    report: Callable[[Problem], None],
    *,
    prefix: Steps = (),
    also_known: Sequence[str] = (),
) -> Model | None:
    """Make `root` a `model`, reporting every fault; None when there was any.

    A scalar with several readings takes the first that its key accepts, so that ``flash_attention: on``
    is text and an engine's ``jinja: on`` is true. Where any text will do, such a word is a trap.

    Args:
        model: what the tree must be.
        root: the tree.
        report: takes each fault.
        prefix: the keys that lead to `root`.
        also_known: names for "did you mean" beside the model's own keys.

    """
    choice: dict[Steps, int] = defaultdict(int)
    while True:
        value, errors = _attempt(model, _plain(root, (), prefix, choice))
        more = {
            steps
            for steps in (_steps(root, error["loc"]) for error in errors)
            if choice[steps] + 1 < len(_readings(root.at(steps)[1], (*prefix, *steps)))
        }
        if not more:
            break
        for steps in more:
            choice[steps] += 1
    for steps, node in root.walk():
        if node.readings[1:] and node.readings[0] is FREE_TEXT and not choice[steps] and not node.faulty:
            truth = str(node.readings[-1]).lower()
            message = f"{node.text} is {truth} to some YAML readers and text to others; put it in quotes"
            report(node.mark.problem(dotted((*prefix, *steps)), message))
            value = None
    for problem in _problems(model, root, errors, prefix, also_known):
        report(problem)
    return value


def _attempt(model: type[Model], data: Any) -> tuple[Model | None, list[Any]]:
    try:
        # JSON, because pydantic's strict mode takes lists for tuples and texts for paths only there
        return model.model_validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        return None, list(error.errors(include_url=False))


def _readings(node: Node, path: Steps) -> tuple[Scalar, ...]:
    first = node.readings[:1]
    if path and path[0] in TEXT_KEYS and first and not isinstance(first[0], str | bool):
        return (node.text,) if str(first[0]) == node.text else first
    return node.readings


def _plain(node: Node, steps: Steps, prefix: Steps, choice: dict[Steps, int]) -> Any:
    if node.entries is not None:
        return {key: _plain(entry, (*steps, key), prefix, choice) for key, entry in node.entries.items()}
    if node.items is not None:
        return [_plain(item, (*steps, index), prefix, choice) for index, item in enumerate(node.items)]
    return _readings(node, (*prefix, *steps))[choice[steps]]


def _steps(root: Node, loc: Sequence[str | int]) -> Steps:
    """Return the way to the node that pydantic means; it puts names of types and ``[key]`` in between."""
    steps: Steps = ()
    for part in loc:
        if len(root.at((*steps, part))[0]) > len(steps):
            steps = (*steps, part)
    return steps


def _problems(
    model: type[BaseModel], root: Node, errors: list[Any], prefix: Steps, also_known: Sequence[str]
) -> list[Problem]:
    grouped: dict[Steps, list[Any]] = defaultdict(list)
    problems: list[Problem] = []
    for error in errors:
        steps = _steps(root, error["loc"])
        nodes = [root.at(steps[:depth])[1] for depth in range(len(steps) + 1)]
        if any(node.faulty for node in nodes):
            continue
        node = nodes[-1]
        if error["type"] == "missing":
            key = (*prefix, *steps, error["loc"][-1])
            problems.append(node.mark.problem(dotted(key), "is missing"))
        elif error["type"] == "extra_forbidden":
            names = (*known_keys(model, steps[:-1]), *(also_known if len(steps) == 1 else ()))
            place = place_of(model, str(steps[-1])) if len(steps) == 1 else None
            hint = f"; did you mean {place}?" if place else did_you_mean(str(steps[-1]), names)
            problems.append(node.key_mark.problem(dotted((*prefix, *steps)), f"is not a known key{hint}"))
        elif "[key]" in error["loc"]:
            problems.append(node.key_mark.problem(dotted((*prefix, *steps)), _message(error)))
        else:
            grouped[steps].append(error)
    for steps, group in grouped.items():
        if not any(other[: len(steps)] == steps and len(other) > len(steps) for other in grouped):
            problems.append(root.at(steps)[1].mark.problem(dotted((*prefix, *steps)), _united(group)))
    return problems


def _united(errors: list[Any]) -> str:
    """Make one sentence of the complaints that the members of a union have about one value."""
    of_right_type = [
        error for error in errors if error["type"] not in _TYPES and error["type"] != "literal_error"
    ]
    messages = list(dict.fromkeys(_message(error) for error in of_right_type or errors))
    told, _, advice = messages[0].partition("; ")
    united = ", or ".join([told, *(other.removeprefix("must be ") for other in messages[1:])])
    return f"{united}; {advice}" if advice else united


def _message(error: Any) -> str:
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    if kind in _RANGES:
        words, limit = _RANGES[kind]
        return (
            f"must be {words} {context[limit]:.10g}"
            if isinstance(context[limit], float)
            else (f"must be {words} {context[limit]}")
        )
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        meant = _MEANT.get(str(given).lower())
        hint = f"; did you mean {meant}?" if meant in choices else ""
        hint = hint or (did_you_mean(given, choices) if isinstance(given, str) else "")
        return f"must be {context['expected'].replace(chr(39), '')}{hint}"
    if kind in _TYPES:
        message = f"must be {_TYPES[kind]}"
        if kind in {"tuple_type", "list_type"} and isinstance(given, str):
            return f"{message}; write it as a list, [one, two]"
        if kind == "string_type" and isinstance(given, bool | int | float):
            return f"{message}; put it in quotes"
        if kind in {"int_type", "float_type"} and isinstance(given, str) and given.isdecimal():
            return f"{message}; leave out the quotes"
        return message
    if kind in {"too_short", "string_too_short"}:
        return (
            "must not be empty"
            if context["min_length"] == 1
            else f"must have {context['min_length']} items at least"
        )
    if kind == "too_long":
        return f"must have {context['max_length']} items at most"
    if kind == "string_pattern_mismatch" and context["pattern"] in _PATTERNS:
        return _PATTERNS[context["pattern"]]
    if kind == "value_error":
        return shown(str(context["error"]), 300)
    text = str(error["msg"])
    return shown(text[:1].lower() + text[1:], 300)
