"""What a profile says is what the program gets: loading, layering, variables, paths, engine sections."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.errors import ProfileError, UnknownBackend
from orchestrator.profile import ModelSpec, Profile, Restart, Timeouts, load


class FakeOptions(BaseModel):
    """The options of an engine that exists only here."""

    model_config = ConfigDict(extra="forbid")

    threads: Annotated[int, Field(ge=1)] | None = None
    mmap: bool = True
    split_mode: Literal["none", "layer", "row"] = "layer"
    attention: Literal["on", "off"] = "off"
    prefix: str = ""


ENGINES: dict[str, type[BaseModel]] = {"llama-server": FakeOptions}
ENVIRON = {"HOME": "/nowhere", "GREETING": "hello", "EMPTY": "", "COUNT": "3", "OCTAL": "010"}
MINIMAL = "model: hub/name\nbackend: llama-server\n"


@pytest.fixture
def profile(tmp_path: Path) -> Any:
    def write_and_load(text: str, name: str = "p.yaml", **options: Any) -> Profile:
        path = tmp_path / name
        path.write_text(text)
        return load(path, **{"environ": ENVIRON, "engines": ENGINES, **options})

    return write_and_load


def faults(text: str, tmp_path: Path, **options: Any) -> list[str]:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load(path, **{"environ": ENVIRON, "engines": ENGINES, **options})
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


# -- values -----------------------------------------------------------------------------------------


def test_a_profile_with_little_has_the_documented_defaults_good(profile: Any) -> None:
    loaded = profile(MINIMAL, name="small.yaml")
    assert loaded.name == "small"
    assert loaded.model == ModelSpec(hf="hub/name")
    assert (loaded.context, loaded.slots, loaded.device, loaded.gpus) == (4096, 1, "auto", None)
    assert (loaded.gpu_layers, loaded.flash_attention, loaded.kv_cache_type) == ("all", "auto", "f16")
    assert (loaded.memory_fraction, loaded.chat_template, loaded.idle_timeout) == (0.9, None, 0)
    assert (loaded.sampling, loaded.env, loaded.args, loaded.command) == ({}, {}, (), None)
    assert loaded.timeouts == Timeouts(start=600, stop=10, request=0, stall=120)
    assert loaded.restart == Restart(attempts=5, window=300, backoff=(0.5, 30))
    assert loaded.options == {}


def test_every_key_arrives_typed_good(profile: Any, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    loaded = profile(
        """
        name: all.of-it_1
        model: {gguf: m.gguf, hf: hub/name, mmproj: m.gguf, lora: [m.gguf]}
        backend: llama-server
        context: 8192
        slots: 2
        device: rocm
        gpus: [GPU-1234abcd, 0]
        gpu_layers: 12
        flash_attention: on
        kv_cache_type: q8_0
        memory_fraction: 0.90
        chat_template: chatml
        sampling: {temperature: 0, stop: [a, b], seed: 7, logit_bias: {12: -1}, extra: {x: {y: 1}}}
        env: {KEY: value, PORT: 8080}
        args: [--foo, bar, 3, 0.5]
        command: [docker, run, -p, "{port}:8080", image]
        timeouts: {start: 1, stop: 2.5, request: 3, stall: 4}
        restart: {attempts: 0, window: 60, backoff: [1, 2.5]}
        idle_timeout: 0
        llama-server: {threads: 4, mmap: off, split_mode: none, attention: on}
        """
    )
    gguf = str(tmp_path / "m.gguf")
    assert loaded.model == ModelSpec(gguf=gguf, hf="hub/name", mmproj=gguf, lora=(gguf,))
    assert (loaded.name, loaded.context, loaded.slots, loaded.device) == ("all.of-it_1", 8192, 2, "rocm")
    assert (loaded.gpus, loaded.gpu_layers, loaded.flash_attention) == (("GPU-1234abcd", 0), 12, "on")
    assert loaded.sampling == {
        "temperature": 0,
        "stop": ("a", "b"),
        "seed": 7,
        "logit_bias": {12: -1},
        "extra": {"x": {"y": 1}},
    }
    assert loaded.env == {"KEY": "value", "PORT": "8080"}
    assert loaded.args == ("--foo", "bar", "3", "0.5")
    assert loaded.command == ("docker", "run", "-p", "{port}:8080", "image")
    assert loaded.timeouts == Timeouts(start=1, stop=2.5, request=3, stall=4)
    assert loaded.restart.backoff == (1, 2.5)
    assert loaded.options == {
        "llama-server": {"threads": 4, "mmap": False, "split_mode": "none", "attention": "on"}
    }
    assert (loaded.directory, loaded.source) == (tmp_path, tmp_path / "p.yaml")


def test_a_profile_is_frozen_and_refuses_unknown_fields_good(profile: Any) -> None:
    loaded = profile(MINIMAL)
    with pytest.raises(ValidationError):
        loaded.slots = 3
    with pytest.raises(ValidationError):
        Profile.model_validate({**loaded.model_dump(), "slotts": 1})


def test_a_profile_made_in_code_needs_no_file_good() -> None:
    made = Profile(name="x", model=ModelSpec(package="p"), backend="b")
    assert made.source is None
    assert Profile.model_validate(made.model_dump()) == made


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_the_words_of_flash_attention_are_texts_good(profile: Any, word: str) -> None:
    assert profile(f"{MINIMAL}flash_attention: {word}\n").flash_attention == word
    assert profile(f"{MINIMAL}flash_attention: '{word}'\n").flash_attention == word


@pytest.mark.parametrize(("word", "truth"), [("yes", True), ("off", False), ("true", True), ("FALSE", False)])
def test_an_engine_s_switch_takes_every_word_for_a_truth_value_good(
    profile: Any, word: str, truth: bool
) -> None:
    assert profile(f"{MINIMAL}llama-server: {{mmap: {word}}}\n").options["llama-server"]["mmap"] is truth


def test_quoted_words_and_numbers_are_texts_good(profile: Any) -> None:
    loaded = profile(MINIMAL + "env: {A: 'no', B: '010', C: '1:30', D: '~'}\nargs: ['1e3', '2024-01-01']\n")
    assert loaded.env == {"A": "no", "B": "010", "C": "1:30", "D": "~"}
    assert loaded.args == ("1e3", "2024-01-01")


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm_good(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load(path, environ=ENVIRON, engines=ENGINES).backend == "llama-server"


def test_anchors_and_merge_keys_work_good(profile: Any) -> None:
    loaded = profile(
        MINIMAL + "timeouts: &t {start: 7, stop: 8}\nenv: &e {A: x, B: y}\n"
        "llama-server: {threads: &n 3}\nslots: *n\nsampling: {json_schema: {<<: [*e, *t], A: mine}}\n"
    )
    assert loaded.slots == 3
    assert loaded.sampling["json_schema"] == {"A": "mine", "B": "y", "start": 7, "stop": 8}


# -- variables --------------------------------------------------------------------------------------


def test_variables_are_filled_in_and_typed_by_their_key_good(profile: Any) -> None:
    loaded = profile(
        MINIMAL
        + "slots: ${COUNT}\ncontext: ${NOT_SET:-2048}\n"
        + 'env: {A: "${GREETING} $$ $x", B: "${EMPTY}", C: "${EMPTY:-d}", D: "${COUNT}", E: "${OCTAL}"}\n'
        + "flash_attention: ${NOT_SET:-on}\nllama-server:\n  mmap: ${NOT_SET:-off}\n"
    )
    assert (loaded.slots, loaded.context, loaded.flash_attention) == (3, 2048, "on")
    assert loaded.env == {"A": "hello $ $x", "B": "", "C": "d", "D": "3", "E": "010"}
    assert loaded.options["llama-server"] == {"mmap": False}


def test_the_process_s_own_environment_is_the_default_good(
    profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROFILE_TEST_SLOTS", "5")
    assert profile(MINIMAL + "slots: ${PROFILE_TEST_SLOTS}\n", environ=None).slots == 5


def test_the_value_of_a_variable_is_not_yaml_ugly(profile: Any) -> None:
    environ = {**ENVIRON, "TRICK": "x\nbackend: other"}
    assert profile(MINIMAL + "env:\n  A: ${TRICK}\n", environ=environ).env == {"A": "x\nbackend: other"}


# -- the model and other files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("package:gemma3_270m", {"package": "gemma3_270m"}),
        ("m.gguf", {"gguf": "m.gguf"}),
        ("M.GGUF", {"gguf": "M.GGUF"}),
        ("blob", {"gguf": "blob"}),
        ("folder", {"hf": "folder"}),
        ("google/gemma-3-270m", {"hf": None}),
    ],
)
def test_a_model_in_short_is_put_into_its_form_good(
    profile: Any, tmp_path: Path, text: str, expected: dict[str, str | None]
) -> None:
    for name in ("m.gguf", "M.GGUF", "blob"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    forms = profile(f"model: {text}\nbackend: llama-server\n").model.model_dump(exclude_unset=True)
    if "package" not in expected:
        expected = {form: str(tmp_path / path) if path else text for form, path in expected.items()}
    assert forms == expected


def test_paths_are_sought_beside_the_file_then_in_the_model_folder_good(profile: Any, tmp_path: Path) -> None:
    models, home = tmp_path / "models", tmp_path / "home"
    for folder in (models, home):
        folder.mkdir()
        (folder / "m.gguf").touch()
    environ = {"ROCM_MODEL_DIR": str(models), "HOME": str(home)}
    short = "model: {}\nbackend: llama-server\nargs: [~/x]\n"
    assert profile(short.format("m.gguf"), environ=environ).model.gguf == str(models / "m.gguf")
    assert profile(short.format("~/m.gguf"), environ=environ).model.gguf == str(home / "m.gguf")
    assert profile(short.format(models / "m.gguf"), environ={}).model.gguf == str(models / "m.gguf")
    assert profile(short.format("~/m.gguf"), environ=environ).args == (f"{home}/x",)
    (tmp_path / "m.gguf").touch()
    assert profile(short.format("m.gguf"), environ=environ).model.gguf == str(tmp_path / "m.gguf")


def test_a_missing_file_says_whether_the_model_folder_is_set_bad(profile: Any, tmp_path: Path) -> None:
    for environ, end in (({}, ", which is not set"), ({"ROCM_MODEL_DIR": str(tmp_path)}, "")):
        with pytest.raises(ProfileError) as caught:
            profile("model: gone.gguf\nbackend: llama-server\n", environ=environ)
        assert str(caught.value).endswith(f"; looked beside the profile and in ROCM_MODEL_DIR{end}")


def test_a_chat_template_is_a_file_or_a_name_good(profile: Any, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").touch()
    assert profile(MINIMAL + "chat_template: chatml\n").chat_template == "chatml"
    assert profile(MINIMAL + "chat_template: chat.jinja\n").chat_template == str(tmp_path / "chat.jinja")
    (tmp_path / "gemma").mkdir()  # a template of ours is meant wherever the profile lies
    assert profile(MINIMAL + "chat_template: gemma\n").chat_template == "gemma"


def test_a_profile_in_the_current_folder_is_found_by_its_name_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(MINIMAL)
    loaded = load("p.yaml", environ=ENVIRON, engines=ENGINES)
    assert (loaded.directory, loaded.source) == (tmp_path, tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "is a folder; name a file in it"),
        (lambda path: path.symlink_to(path), "can't be read: too many levels of symbolic links"),
        (lambda path: path.write_text("# " + "x" * 300_000), "is larger than 256 KiB; is it a profile?"),
    ],
)
def test_what_is_no_profile_file_is_named_as_what_it_is_bad(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "p.yaml"
    make(path)
    with pytest.raises(ProfileError) as caught:
        load(path, environ=ENVIRON, engines=ENGINES)
    assert str(caught.value) == f"profile: {path}: {message}"
    assert caught.value.exit_code == 2


def test_a_pipe_is_refused_without_waiting_for_its_writer_ugly(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="not a regular file"):
        load(tmp_path / "pipe", environ=ENVIRON, engines=ENGINES)


def test_a_path_with_a_nul_is_a_fault_ugly() -> None:
    with pytest.raises(ProfileError, match="can't be read"):
        load("a\0b", environ=ENVIRON, engines=ENGINES)


# -- layers -----------------------------------------------------------------------------------------


def test_a_profile_is_laid_over_the_one_it_extends_good(profile: Any, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "m.gguf").touch()
    (tmp_path / "base" / "root.yaml").write_text("backend: llama-server\nenv: {A: root, B: root}\nslots: 2\n")
    (tmp_path / "base" / "base.yaml").write_text(
        "extends: root.yaml\nname: base\nmodel: m.gguf\nenv: {B: base}\nargs: [a, b]\n"
    )
    loaded = profile("extends: base/base.yaml\nenv: {C: top}\nargs: [c]\n", name="top.yaml")
    assert loaded.name == "top"
    assert loaded.model.gguf == str(tmp_path / "base" / "m.gguf")
    assert loaded.env == {"A": "root", "B": "base", "C": "top"}
    assert (loaded.args, loaded.slots, loaded.directory) == (("c",), 2, tmp_path)


def test_faults_of_a_file_are_told_although_its_base_is_missing_bad(tmp_path: Path) -> None:
    assert faults("extends: gone.yaml\nslots: 0\n", tmp_path) == [
        "p.yaml:1:10: extends: gone.yaml: no such file",
        "p.yaml:2:8: slots: must be at least 1",
    ]


def test_overrides_win_over_the_file_and_later_ones_over_earlier_good(profile: Any) -> None:
    loaded = profile(
        MINIMAL + "slots: 2\ntimeouts: {start: 5}\n",
        overrides=[
            "slots=3",
            "slots=4",
            "timeouts.stop=6",
            "llama-server.threads=2",
            "args=[--a=b, c]",
            "flash_attention=on",
            "sampling.stop=a=b",
        ],
    )
    assert (loaded.slots, loaded.args, loaded.flash_attention) == (4, ("--a=b", "c"), "on")
    assert (loaded.timeouts.start, loaded.timeouts.stop) == (5, 6)
    assert (loaded.options, loaded.sampling) == ({"llama-server": {"threads": 2}}, {"stop": "a=b"})


def test_an_override_may_mend_what_the_file_has_wrong_good(profile: Any) -> None:
    assert profile(MINIMAL + "slots: 0\n", overrides=["slots=2"]).slots == 2


def test_a_path_in_an_override_starts_in_the_current_folder_good(
    profile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "m.gguf").touch()
    monkeypatch.chdir(here)
    assert profile(MINIMAL, overrides=["model=m.gguf"]).model.gguf == str(here / "m.gguf")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("slots=0", "--set slots=0: slots: must be at least 1"),
        ("slots", "--set slots: must be KEY=VALUE, KEY with dots between its parts"),
        ("=3", "--set =3: must be KEY=VALUE, KEY with dots between its parts"),
        ("a..b=3", "--set a..b=3: must be KEY=VALUE, KEY with dots between its parts"),
        ("slots=", "--set slots=: slots: is empty"),
        ("slots=010", "--set slots=010: slots: 010 is 8 to some YAML readers and 10 to others; "
         "write 8 or 10, or put it in quotes"),
        ("env={A: 1, A: 2}", "--set env={A: 1, A: 2}: env.A: is given twice"),
        ("args=[010]", "--set args=[010]: args[0]: 010 is 8 to some YAML readers and 10 to others; "
         "write 8 or 10, or put it in quotes"),
        ("args=[a", "--set args=[a: args: not YAML: expected ',' or ']', but got '<stream end>', "
         "while parsing a flow sequence that began on line 1"),
        ("slotts=1", "--set slotts=1: slotts: is not a known key; did you mean slots?"),
        ("slots.a=1", "--set slots.a=1: slots: must be a whole number"),
        ("extends=x.yaml", "--set extends=x.yaml: extends: "
         "can't be set here; name the other profile instead"),
        ("a\nb=1", "--set a\\nb=1: a\\nb: is not a known key"),
    ],
)  # fmt: skip
def test_a_fault_in_an_override_is_placed_there_bad(tmp_path: Path, override: str, expected: str) -> None:
    assert faults(MINIMAL, tmp_path, overrides=[override]) == [expected]


def test_the_backend_given_apart_wins_good(profile: Any) -> None:
    engines = {**ENGINES, "vllm-cpu": FakeOptions}
    loaded = profile(MINIMAL, overrides=["backend=x"], backend="vllm-cpu", engines=engines)
    assert loaded.backend == "vllm-cpu"


def test_a_wrong_backend_given_apart_is_placed_there_bad(tmp_path: Path) -> None:
    assert faults(MINIMAL, tmp_path, backend="llama-sever") == [
        "--backend llama-sever: backend: llama-sever is not an installed backend; did you mean llama-server?"
    ]


# -- engines ----------------------------------------------------------------------------------------


def test_a_family_s_section_and_memory_fraction_come_with_its_backend_good(profile: Any) -> None:
    engines = {**ENGINES, "vllm-cpu": FakeOptions}
    sections = "vllm: {threads: 1}\nllama-server: {threads: 2}\n"
    text = f"model: hub/name\nbackend: vllm-cpu\nmemory_fraction: 0.5\n{sections}"
    loaded = profile(text, engines=engines)
    assert loaded.memory_fraction == 0.5
    assert loaded.options == {"vllm": {"threads": 1}, "llama-server": {"threads": 2}}


def test_a_backend_that_can_t_be_imported_is_told_where_its_section_stands_bad(tmp_path: Path) -> None:
    class Broken(dict[str, type[BaseModel]]):
        def __getitem__(self, name: str) -> type[BaseModel]:
            raise UnknownBackend(f"backend: {name!r} can't be imported: no module named x")

    engines: Mapping[str, type[BaseModel]] = Broken(ENGINES)
    assert faults(MINIMAL + "llama-server: {threads: 1}\n", tmp_path, engines=engines) == [
        "p.yaml:3:1: llama-server: can't be checked: "
        "backend: 'llama-server' can't be imported: no module named x"
    ]
