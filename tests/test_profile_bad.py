"""Every bad profile has its exact lines; nothing but ProfileError ever comes out.

Each ``data/bad_profiles/NAME.yaml`` has a ``NAME.expected`` with the whole message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ProfileError
from orchestrator.profile import Profile, load
from orchestrator.profile_schema import Keys
from orchestrator.yaml_scalars import core, legacy
from tests.test_profile import ENGINES, ENVIRON, MINIMAL

FOLDER = Path(__file__).parent / "data" / "bad_profiles"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def test_there_are_many_bad_profiles_each_with_its_lines_good() -> None:
    assert len(NAMES) >= 40
    assert {path.stem for path in FOLDER.glob("*.expected")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_profile_names_every_fault_at_its_place_bad(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    with pytest.raises(ProfileError) as caught:
        load(f"{name}.yaml", environ=ENVIRON, engines=ENGINES)
    assert str(caught.value) + "\n" == Path(f"{name}.expected").read_text()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_s_column_points_at_what_is_wrong_bad(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of a known key's fault is within the file, and not on blank."""
    monkeypatch.chdir(FOLDER)
    with pytest.raises(ProfileError) as caught:
        load(f"{name}.yaml", environ=ENVIRON, engines=ENGINES)
    for problem in caught.value.problems:
        assert problem.line >= 1
        assert problem.column >= 1
        assert "\n" not in str(problem)
        assert not problem.message.endswith(".")
        if problem.key and not problem.message.startswith("has no value"):
            line = Path(problem.where).read_text().splitlines()[problem.line - 1]
            assert not line[problem.column - 1].isspace()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gema.yaml", "; did you mean gemma.yaml?"),
        ("gemma.yml", "; did you mean gemma.yaml?"),
        ("other.yaml", ""),
    ],
)
def test_a_mistyped_file_is_guessed_bad(name: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "gemma.yaml").touch()
    with pytest.raises(ProfileError) as caught:
        load(tmp_path / name, environ=ENVIRON, engines=ENGINES)
    assert str(caught.value).endswith(f"{name}: no such file{hint}")


# -- fuzz -------------------------------------------------------------------------------------------


def load_or_fault(data: bytes, folder: Path, **options: Any) -> Profile | None:
    path = folder / "p.yaml"
    path.write_bytes(data)
    try:
        return load(path, environ=ENVIRON, engines=ENGINES, **options)
    except ProfileError as error:
        problems = error.problems
    assert problems
    assert all(len(str(problem).splitlines()) == 1 for problem in problems)
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


WORDS = "no on yes 010 1:30 1e3 0x1f ~ null 2024-01-01 .inf = 1_0 auto ${COUNT} ${ $$ *a !!x << ? %".split()  # noqa: SIM905
WORDS += [*"{}[]#'|>", '"', "---"]
WORDS += [": ", "- ", "\n", "\n  ", "\t", "&a x", "\0", "\ud7ff", "\U0001f600", "\x85", "\u2028", "hf:x/y"]
KEYS = [*Keys.model_fields, "extends", "container", "llama-server", "vllm", "x", "start", "gguf", "on", "<<"]
yaml_like = st.lists(st.sampled_from([*WORDS, *KEYS, *(f"\n{key}: " for key in KEYS)]), max_size=30).map(
    "".join
)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=200), yaml_like, yaml_like.map((MINIMAL + "{}").format)))
def test_any_text_loads_or_is_a_profile_error_ugly(folder: Path, text: str) -> None:
    load_or_fault(text.encode(errors="surrogatepass"), folder)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_load_or_are_a_profile_error_ugly(folder: Path, data: bytes) -> None:
    load_or_fault(data, folder)


@settings(deadline=None, max_examples=100)
@given(yaml_like, st.one_of(st.none(), st.text(max_size=20)))
def test_any_override_loads_or_is_a_profile_error_ugly(folder: Path, text: str, backend: str | None) -> None:
    load_or_fault(MINIMAL.encode(), folder, overrides=[text, f"env={text}"], backend=backend)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from(WORDS)
)
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=8))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(KEYS), trees, max_size=8))
def test_any_values_load_or_are_a_profile_error_ugly(folder: Path, tree: dict[str, Any]) -> None:
    text = yaml.safe_dump({"model": "hub/name", "backend": "llama-server", **tree}, allow_unicode=True)
    load_or_fault(text.encode(errors="surrogatepass"), folder)


counts = st.integers(1, 4096)
texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0~$"), max_size=20)
# what PyYAML writes without quotes, since it takes it for text, and others take for a number: 0E0
texts = texts.filter(lambda text: isinstance(core(text), str) or not isinstance(legacy(text), str))
good = st.fixed_dictionaries(
    {"model": st.just("hub/name"), "backend": st.just("llama-server")},
    optional={
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
        "context": counts,
        "slots": counts,
        "device": st.sampled_from(["auto", "rocm", "cuda", "vulkan", "cpu"]),
        "gpus": st.lists(st.integers(0, 9), min_size=1, unique=True),
        "gpu_layers": st.one_of(st.just("all"), counts),
        "flash_attention": st.sampled_from(["on", "off", "auto"]),
        "env": st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), texts, max_size=3),
        "args": st.lists(texts, max_size=4),
        "timeouts": st.fixed_dictionaries({}, optional={"start": st.floats(0, 1e6), "stop": counts}),
        "sampling": st.fixed_dictionaries({}, optional={"seed": counts, "top_p": st.floats(0.1, 1)}),
        "llama-server": st.fixed_dictionaries({}, optional={"mmap": st.booleans(), "prefix": texts}),
    },
)


@settings(deadline=None, max_examples=150)
@given(good)
def test_a_good_profile_comes_back_as_it_was_written_good(folder: Path, written: dict[str, Any]) -> None:
    loaded = load_or_fault(yaml.safe_dump(written).encode(), folder)
    assert loaded is not None
    for key, value in written.items():
        if key == "model":
            assert loaded.model.hf == value
        elif key == "llama-server":
            assert loaded.options[key] == value
        elif key == "timeouts":
            assert loaded.timeouts.model_dump(exclude_unset=True) == value
        else:
            stored = getattr(loaded, key)
            assert (list(stored) if isinstance(value, list) else stored) == value
