"""Which of some labels continues a prompt, by exact probabilities. No I/O.

The labels are continuations: their probability is that of the model going on with exactly that text, the
product of its tokens' probabilities, made to add up to 1 over the labels. Each prompt is tokenised together
with each label, as the model would see it, which gives one sequence of tokens a label. What all sequences
share is context, so labels that begin alike cost nothing; where they part, one forward pass tells the
probabilities of all next tokens. Labels that part at one place, the usual case, need one pass a prompt;
labels of several tokens need one more for each further place. A label that is the beginning of another one
gets what is left after the longer one.

The walk is a generator: it yields a `Query`, is sent the log probabilities asked for, and returns the
result; the sync and the async shell do the asking.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.errors import ProtocolError
from orchestrator.request import Options
from orchestrator.tokens import Classification, Token

# How many of the likeliest tokens a query asks for: vLLM's limit unless it is told otherwise. A token that
# is not among them is asked for by itself.
TOP = 20
FORCE = 100.0  # added to a token's logit so that it is chosen; reported probabilities are from before that

_ONE_TOKEN: Options = {
    "max_tokens": 1,
    "temperature": 0.0,
    "logprobs": TOP,
    "extra": {"return_tokens_as_token_ids": True},  # vLLM names alternatives by text otherwise
}


Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Query:
    """What the next token's log probabilities are after some tokens.

    Attributes:
        prompt: the tokens.
        wanted: the next tokens of interest.

    """

    prompt: Ids
    wanted: Ids


Walk: TypeAlias = Generator[Query, Mapping[int, float], Classification]


def check_labels(labels: Sequence[str]) -> None:
    """Refuse labels that can't be told apart.

    Raises:
        ValueError: fewer than two, an empty one, or one twice.

    """
    if len(labels) < 2 or len(set(labels)) < len(labels) or not all(labels):
        raise ValueError(f"classify: labels must be two or more different texts, not {list(labels)}")


def questions(query: Query, known: Mapping[int, float]) -> list[Options]:
    """Return the options of the generations after ``query.prompt`` that are still needed."""
    if not known:
        return [_ONE_TOKEN]
    return [{**_ONE_TOKEN, "logit_bias": {token: FORCE}} for token in query.wanted if token not in known]


def found(tokens: Sequence[Token]) -> dict[int, float]:
    """Return the log probabilities in such a generation: of the alternatives, and of the chosen token.

    Raises:
        ProtocolError: the server told none.

    """
    known: dict[int, float] = {}
    for token in tokens[:1]:
        known = {other.id: other.logprob for other in token.top if other.id is not None}
        if token.id is not None and token.logprob is not None:
            known[token.id] = token.logprob
    if not known:
        raise ProtocolError("classify: the server tells no token ids with its log probabilities")
    return known


def walk(labels: Sequence[str], sequences: Sequence[Sequence[int]]) -> Walk:
    """Classify one prompt.

    Args:
        labels: the labels.
        sequences: tokens of the prompt with each label appended.

    Raises:
        ValueError: two labels are the same tokens.
        ProtocolError: the server did not tell a probability that was asked for.

    """
    paths = [tuple(sequence) for sequence in sequences]
    if len(set(paths)) < len(paths):
        raise ValueError("classify: two labels are the same to the model's tokeniser")
    parting = (at for at, column in enumerate(zip(*paths, strict=False)) if len(set(column)) > 1)
    shared = paths[0][: next(parting, min(map(len, paths)))]
    reached = {shared: 0.0}  # log probability of each beginning of a label, given what all share
    for length in range(len(shared), max(map(len, paths))):
        for start in sorted({path[:length] for path in paths if len(path) > length}):
            wanted = sorted({path[length] for path in paths if len(path) > length and path[:length] == start})
            after = yield Query(start, tuple(wanted))
            for token in wanted:
                if token not in after:  # asked for with FORCE, and still something else was chosen
                    raise ProtocolError(
                        f"classify: the server does not tell the probability of token {token}"
                    )
                reached[(*start, token)] = reached[start] + after[token]
    masses = _masses({path: reached[path] for path in paths})
    total = sum(masses.values())
    probabilities = {label: masses[path] / total for label, path in zip(labels, paths, strict=True)}
    return Classification(max(probabilities, key=probabilities.__getitem__), probabilities)


def _masses(reached: Mapping[Ids, float]) -> dict[Ids, float]:
    """Return each label's probability, up to one factor, without that of the longer labels it begins."""
    peak = max(reached.values())
    masses: dict[Ids, float] = {}
    for path in sorted(reached, key=len, reverse=True):
        longer = sum(mass for other, mass in masses.items() if other[: len(path)] == path)
        masses[path] = max(0.0, math.exp(reached[path] - peak) - longer)
    return masses
