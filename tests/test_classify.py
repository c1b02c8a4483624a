"""The walk over labels, against probabilities worked out by hand from a made-up model."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.classify import check_labels, found, questions, walk
from orchestrator.errors import ProtocolError
from orchestrator.tokens import Alternative, Token


def probability(prompt, token):
    """A model over four tokens whose distribution depends on everything before."""
    weights = [1 + (sum(prompt) * 7 + len(prompt) * 3 + candidate * 5) % 11 for candidate in range(4)]
    return weights[token] / sum(weights)


def run(labels, sequences):
    steps = walk(labels, sequences)
    queries = []
    try:
        query = next(steps)
        while True:
            queries.append(query)
            query = steps.send({t: math.log(probability(query.prompt, t)) for t in query.wanted})
    except StopIteration as done:
        return done.value, queries


def joint(base, path):
    return math.prod(probability(path[:at], path[at]) for at in range(len(base), len(path)))


def test_labels_of_one_token_need_one_pass_good():
    result, queries = run(["a", "b"], [(0, 1, 2), (0, 1, 3)])
    assert len(queries) == 1
    a, b = probability((0, 1), 2), probability((0, 1), 3)
    assert result.probabilities == pytest.approx({"a": a / (a + b), "b": b / (a + b)})
    assert result.label == ("a" if a > b else "b")


def test_a_shared_beginning_is_context_and_costs_nothing_good():
    result, queries = run(["x", "y"], [(0, 1, 1, 2), (0, 1, 1, 3)])
    assert [query.prompt for query in queries] == [(0, 1, 1)]
    a, b = probability((0, 1, 1), 2), probability((0, 1, 1), 3)
    assert result.probabilities["x"] == pytest.approx(a / (a + b))


def test_labels_of_several_tokens_get_the_product_good():
    paths = {"p": (0, 1, 2), "q": (0, 2, 2, 3), "r": (0, 2, 1)}
    result, _ = run(list(paths), list(paths.values()))
    masses = {label: joint((0,), path) for label, path in paths.items()}
    total = sum(masses.values())
    assert result.probabilities == pytest.approx({label: mass / total for label, mass in masses.items()})


def test_a_label_that_begins_another_gets_what_the_longer_leaves_good():
    result, _ = run(["yes", "yes sir"], [(0, 1), (0, 1, 2)])
    longer = probability((0, 1), 2)
    assert result.probabilities == pytest.approx({"yes": 1 - longer, "yes sir": longer})


@settings(deadline=None)
@given(st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=2, max_size=7))
def test_probabilities_equal_those_of_sampling_whole_texts_good(paths):
    """Sum the model over all long texts, each counted for the longest label it begins with."""
    paths = sorted(paths)
    result, _ = run([str(path) for path in paths], [(0, *path) for path in paths])
    masses = dict.fromkeys(paths, 0.0)
    depth = max(map(len, paths))
    for text in itertools.product(range(4), repeat=depth):
        owners = [path for path in paths if text[: len(path)] == path]
        if owners:
            masses[max(owners, key=len)] += joint((0,), (0, *text))
    total = sum(masses.values())
    assert result.probabilities == pytest.approx(
        {str(p): mass / total for p, mass in masses.items()}, abs=1e-9
    )


def test_very_unlikely_labels_still_compare_ugly():
    steps = walk(["a", "b"], [(0, 1), (0, 2)])
    next(steps)
    with pytest.raises(StopIteration) as done:
        steps.send({1: -9000.0, 2: -9000.0 - math.log(3)})
    assert done.value.value.probabilities == pytest.approx({"a": 0.75, "b": 0.25})


@pytest.mark.parametrize("labels", [[], ["a"], ["a", "a"], ["a", ""]])
def test_labels_that_cannot_be_told_apart_bad(labels):
    with pytest.raises(ValueError, match="labels must be"):
        check_labels(labels)


def test_labels_of_the_same_tokens_bad():
    with pytest.raises(ValueError, match="same to the model"):
        next(walk(["a", "b"], [(0, 1), (0, 1)]))


def test_only_tokens_that_were_not_among_the_likeliest_are_forced_good():
    steps = walk(["a", "b", "c"], [(0, 1), (0, 2), (0, 3)])
    query = next(steps)
    (first,) = questions(query, {})
    assert first["max_tokens"] == 1
    assert "logit_bias" not in first
    known = found([Token("b", 2, -0.5, top=(Alternative("b", 2, -0.5), Alternative("x", 9, -1.0)))])
    assert known == {2: -0.5, 9: -1.0}
    assert [next(iter(options["logit_bias"])) for options in questions(query, known)] == [1, 3]


@pytest.mark.parametrize("tokens", [[], [Token("a")], [Token("a", 1)], [Token("a", None, -1.0)]])
def test_server_without_ids_or_probabilities_is_refused_bad(tokens):
    with pytest.raises(ProtocolError, match="tells no token ids"):
        found(tokens)


def test_probability_that_never_comes_is_an_error_not_a_guess_ugly():
    steps = walk(["a", "b"], [(0, 1), (0, 2)])
    next(steps)
    with pytest.raises(ProtocolError, match="token 2"):
        steps.send({1: -1.0})
