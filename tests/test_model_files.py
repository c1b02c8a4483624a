"""Finding a model's file, and putting a packaged model together whatever happens meanwhile."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.errors import ModelError, NotAModel, UnsupportedModel
from orchestrator.gguf_header import read
from orchestrator.model_files import adapters, default_cache, projector, resolve
from orchestrator.model_package import assembled
from tests.gguf_files import LLAMA_KEYS, LLAMA_TENSORS, embedded_model, gguf_bytes, tiny_llama


@dataclass
class Model:
    package: str | None = None
    gguf: str | None = None
    hf: str | None = None
    mmproj: str | None = None
    lora: tuple[str, ...] = ()


def put(path: Path, kind: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes([*LLAMA_KEYS, *([("general.type", "str", kind)] if kind else [])]))
    return path


# -- paths ------------------------------------------------------------------------------------------


def test_a_path_begins_at_the_profile_then_in_the_model_folder_good(tmp_path):
    profiles, models = tmp_path / "profiles", tmp_path / "models"
    profiles.mkdir()
    environ = {"ROCM_MODEL_DIR": str(models)}
    there = put(models / "sub" / "m.gguf")
    assert resolve(Model(gguf="sub/m.gguf"), directory=profiles, environ=environ) == there
    beside = put(profiles / "sub" / "m.gguf")
    assert resolve(Model(gguf="sub/m.gguf"), directory=profiles, environ=environ) == beside
    assert resolve(Model(gguf=str(there)), directory=profiles, environ={}) == there


def test_home_is_the_environment_s_good(tmp_path):
    there = put(tmp_path / "home" / "m.gguf")
    environ = {"HOME": str(tmp_path / "home")}
    assert resolve(Model(gguf="~/m.gguf"), directory=tmp_path, environ=environ) == there
    assert default_cache(environ) == tmp_path / "home" / ".cache" / "orchestrator" / "models"
    assert default_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/orchestrator/models")


def test_a_missing_file_is_named_with_what_is_near_bad(tmp_path):
    put(tmp_path / "llama-3-8b.gguf")
    with pytest.raises(NotAModel, match=r"model: llama-3-8.gguf does not exist") as caught:
        resolve(Model(gguf="llama-3-8.gguf"), directory=tmp_path, environ={})
    assert caught.value.advice == "did you mean llama-3-8b.gguf?"
    with pytest.raises(NotAModel, match="does not exist"):
        resolve(Model(gguf="nul\0byte"), directory=tmp_path, environ={})
    with pytest.raises(NotAModel) as caught:
        resolve(Model(gguf="other"), directory=tmp_path, environ={"ROCM_MODEL_DIR": "/nowhere"})
    assert caught.value.advice == f"looked for {tmp_path}/other and /nowhere/other"


@pytest.mark.parametrize(
    ("kind", "said", "advice"),
    [
        ("mmproj", r"is a projector \(mmproj\), not a model", "model.mmproj"),
        ("adapter", r"is an adapter \(LoRA\), not a model", "model.lora"),
        ("imatrix", "is an importance matrix, not a model", "name a model"),
    ],
)
def test_what_is_no_model_is_refused_by_name_bad(tmp_path, kind, said, advice):
    put(tmp_path / "m.gguf", kind)
    with pytest.raises(UnsupportedModel, match=said) as caught:
        resolve(Model(gguf="m.gguf"), directory=tmp_path, environ={})
    assert advice in caught.value.advice


def test_a_folder_is_refused_with_a_file_to_name_bad(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnsupportedModel, match="is a folder") as caught:
        resolve(Model(gguf="folder"), directory=tmp_path, environ={})
    assert caught.value.advice == "there is no GGUF file in it"
    put(tmp_path / "folder" / "m.gguf")
    with pytest.raises(UnsupportedModel) as caught:
        resolve(Model(gguf="folder"), directory=tmp_path, environ={})
    assert "m.gguf" in caught.value.advice


def test_a_model_without_gguf_form_is_refused_bad(tmp_path):
    with pytest.raises(UnsupportedModel, match="owner/name has no GGUF form"):
        resolve(Model(hf="owner/name"), directory=tmp_path, environ={})


def test_any_shard_leads_to_the_first_good(tmp_path):
    first = tiny_llama(tmp_path / "tiny.gguf", split_tensors=8)
    for name in (first.name, "tiny-00003-of-00003.gguf"):
        assert resolve(Model(gguf=name), directory=tmp_path, environ={}) == first
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(NotAModel, match=r"tiny-00002-of-00003\.gguf"):
        resolve(Model(gguf=first.name), directory=tmp_path, environ={})


def test_projector_and_adapters_are_checked_good(tmp_path):
    eye, lora = put(tmp_path / "eye.gguf", "mmproj"), put(tmp_path / "lora.gguf", "adapter")
    spec = Model(mmproj="eye.gguf", lora=("lora.gguf", str(lora)))
    assert projector(spec, directory=tmp_path, environ={}) == eye
    assert adapters(spec, directory=tmp_path, environ={}) == (lora, lora)
    assert projector(Model(), directory=tmp_path, environ={}) is None
    assert adapters(Model(), directory=tmp_path, environ={}) == ()


def test_a_model_as_projector_or_adapter_is_refused_bad(tmp_path):
    put(tmp_path / "m.gguf")
    spec = Model(mmproj="m.gguf", lora=("m.gguf",))
    with pytest.raises(UnsupportedModel, match=r"model\.mmproj: .* is a model, not a projector"):
        projector(spec, directory=tmp_path, environ={})
    with pytest.raises(UnsupportedModel, match=r"model\.lora: .* is a model, not an adapter"):
        adapters(spec, directory=tmp_path, environ={})


# -- packages ---------------------------------------------------------------------------------------

CONTENT = gguf_bytes(LLAMA_KEYS, LLAMA_TENSORS) + bytes(range(256)) * 20_000  # about 5 MB, several blocks
PACKAGE = "a_model_for_tests_gguf"


class Package:
    """An installed package that brings a model in three parts."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.cache = site / "cache"
        self.file = self.cache / PACKAGE / "model.gguf"
        self.parts = [site / PACKAGE / f"part{number}" for number in range(3)]
        (site / PACKAGE).mkdir(parents=True)
        third = len(CONTENT) // 3
        for number, part in enumerate(self.parts):
            part.write_bytes(CONTENT[number * third : None if number == 2 else (number + 1) * third])
        self.write()

    def write(self, name: str = "model.gguf", sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> None:
        (self.site / PACKAGE / "__init__.py").write_text(
            f"from pathlib import Path\nMODEL_NAME = {name!r}\nEXPECTED_SHA256 = {sha256!r}\n"
            f"def chunk_paths():\n    return [Path(__file__).with_name(f'part{{n}}') for n in range(3)]\n"
        )
        sys.modules.pop(PACKAGE, None)
        importlib.invalidate_caches()

    def assembled(self, **options) -> Path:
        return assembled(PACKAGE, cache_dir=self.cache, **options)

    def child(self, program: str) -> subprocess.Popen[str]:
        """Start a process that has the package, and a `run(progress)`."""
        before = (
            "import os, signal, sys\nfrom pathlib import Path\n"
            "from orchestrator.model_package import assembled\n"
            f"def run(progress=None):\n"
            f"    return assembled({PACKAGE!r}, cache_dir=Path({str(self.cache)!r}), progress=progress)\n"
        )
        environ = {**os.environ, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", before + program],
            env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    @property
    def left(self) -> set[str]:
        return {each.name for each in self.file.parent.iterdir()}


WHOLE = {"model.gguf", "model.gguf.stamp", "model.gguf.lock"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the module is rewritten within its file's mtime
    monkeypatch.syspath_prepend(tmp_path)
    yield Package(tmp_path)
    sys.modules.pop(PACKAGE, None)


def test_a_packaged_model_is_put_together_once_good(package):
    seen = []
    spec = Model(package=PACKAGE.replace("_", "-"))
    found = resolve(
        spec, directory=package.site, cache_dir=package.cache, progress=lambda *each: seen.append(each)
    )
    assert found == package.file
    assert found.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)
    assert package.left == WHOLE
    before = found.stat()
    seen.clear()
    assert package.assembled(progress=lambda *each: seen.append(each)) == found
    assert seen == []
    assert found.stat() == before


def test_the_file_is_moved_to_its_name_when_whole_good(package):
    partial, inodes = package.file.with_name("model.gguf.partial"), set()

    def progress(done, total):
        assert not package.file.exists()
        inodes.add(partial.stat().st_ino)

    package.assembled(progress=progress)
    assert inodes == {package.file.stat().st_ino}


def test_a_touched_file_is_verified_and_kept_good(package):
    inode = package.assembled().stat().st_ino
    os.utime(package.file)
    seen = []
    package.assembled(progress=lambda *each: seen.append(each))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert package.file.stat().st_ino == inode
    package.assembled(progress=lambda *each: pytest.fail("it was verified before"))


@pytest.mark.parametrize("stamp", ["", "{", "[]", '{"sha256": "0"}'])
def test_a_torn_stamp_costs_a_verification_only_ugly(package, stamp):
    inode = package.assembled().stat().st_ino
    (package.file.parent / "model.gguf.stamp").write_text(stamp)
    assert package.assembled().stat().st_ino == inode


def test_a_truncated_file_is_made_anew_bad(package):
    os.truncate(package.assembled(), 1000)
    assert package.assembled().read_bytes() == CONTENT


def test_a_changed_file_of_the_same_size_and_time_is_made_anew_bad(package):
    before = package.assembled().stat()
    with package.file.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"!")
    os.utime(package.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert package.assembled().read_bytes() == CONTENT


def test_another_version_of_the_package_replaces_the_file_good(package):
    package.assembled()
    package.parts[2].write_bytes(b"new")
    changed = CONTENT[: len(CONTENT) // 3 * 2] + b"new"
    package.write(sha256=hashlib.sha256(changed).hexdigest())
    assert package.assembled().read_bytes() == changed


@pytest.mark.chaos
@pytest.mark.parametrize("block", [1, 2, 4, 6])
def test_killed_at_any_block_the_next_call_starts_clean_ugly(package, block):
    child = package.child(
        f"calls = []\ndef progress(done, total):\n    calls.append(done)\n"
        f"    if len(calls) == {block}: os.kill(os.getpid(), signal.SIGKILL)\nrun(progress)"
    )
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert not package.file.exists()
    assert package.assembled().read_bytes() == CONTENT
    assert package.left == WHOLE


@pytest.mark.chaos
def test_killed_between_move_and_stamp_the_next_call_verifies_ugly(package):
    inode = package.assembled().stat().st_ino
    (package.file.parent / "model.gguf.stamp").unlink()
    assert package.assembled().stat().st_ino == inode
    assert package.left == WHOLE


@pytest.mark.chaos
def test_several_at_once_write_once_good(package):
    program = (
        "import hashlib\nsys.stdin.readline()\npath = run()\n"
        "print(path.stat().st_ino, hashlib.sha256(path.read_bytes()).hexdigest())"
    )
    children = [package.child(program) for _ in range(3)]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    said = {child.communicate(timeout=60)[0] for child in children}
    assert said == {f"{package.file.stat().st_ino} {hashlib.sha256(CONTENT).hexdigest()}\n"}
    assert package.left == WHOLE


@pytest.mark.chaos
def test_who_waits_goes_on_when_the_writer_is_killed_ugly(package):
    child = package.child(
        "def progress(done, total):\n    print(done, flush=True)\n    sys.stdin.readline()\nrun(progress)"
    )
    assert int(child.stdout.readline()) > 0  # it holds the lock, one block is written
    waited = []

    def progress(done, total):
        if child.poll() is None:
            waited.append((done, total))
            child.kill()
            child.wait()

    assert package.assembled(progress=progress).read_bytes() == CONTENT
    child.communicate()
    assert waited[0][1] == len(CONTENT)
    assert package.left == WHOLE


def test_a_writer_without_progress_is_given_up_on_bad(package):
    package.file.parent.mkdir(parents=True)
    with (package.file.parent / "model.gguf.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=r"another process holds .* and makes no progress"):
            package.assembled(stall=0.1)


def test_what_progress_raises_calls_it_off_and_leaves_nothing_ugly(package):
    class Cancelled(Exception):
        pass

    def progress(done, total):
        raise Cancelled

    with pytest.raises(Cancelled):
        package.assembled(progress=progress)
    assert package.left == {"model.gguf.lock"}
    assert package.assembled().read_bytes() == CONTENT


def test_damaged_parts_are_refused_and_nothing_is_left_bad(package):
    package.parts[1].write_bytes(b"?" * package.parts[1].stat().st_size)
    with pytest.raises(ModelError, match=r"its parts have the sha256 [0-9a-f]{64}, should be") as caught:
        package.assembled()
    assert "--force-reinstall" in caught.value.advice
    assert package.left == {"model.gguf.lock"}


def test_a_disk_too_small_is_noticed_before_writing_bad(package):
    with package.parts[2].open("r+b") as part:
        part.truncate(8 << 40)  # a hole, it takes no room itself
    with pytest.raises(ModelError, match=r"needs \d+ MiB in .*, \d+ MiB are free"):
        package.assembled()
    assert package.left == {"model.gguf.lock"}


def test_a_cache_that_can_not_be_made_bad(package):
    package.cache.write_text("in the way")
    with pytest.raises(ModelError, match="can't be used: not a directory") as caught:
        package.assembled()
    assert "XDG_CACHE_HOME" in caught.value.advice


def test_a_package_that_is_not_installed_comes_with_its_command_bad(tmp_path):
    with pytest.raises(ModelError, match="package:no_such_model_gguf: not installed") as caught:
        assembled("no_such_model_gguf", cache_dir=tmp_path)
    assert caught.value.advice == "install it: python -m pip install no-such-model-gguf"


def test_a_part_that_is_not_installed_is_named_bad(package):
    package.parts[1].unlink()
    with pytest.raises(ModelError, match=f"a part is missing: {package.parts[1]}"):
        package.assembled()
    (package.site / PACKAGE / "__init__.py").write_text("import no_such_part")
    sys.modules.pop(PACKAGE, None)
    with pytest.raises(ModelError, match="needs no_such_part, which is not installed"):
        package.assembled()


@pytest.mark.parametrize("name", ["json", "email"])
def test_a_package_without_a_model_is_refused_bad(tmp_path, name):
    with pytest.raises(UnsupportedModel, match=f"package:{name}: brings no model"):
        assembled(name, cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["../evil.gguf", "/evil.gguf", "", ".."])
def test_a_package_s_file_stays_in_its_folder_bad(package, name):
    package.write(name=name)
    with pytest.raises(UnsupportedModel, match="is not a GGUF file's name"):
        package.assembled()


@pytest.mark.parametrize("name", ["", "a b", "../x", "os.path", "a;b"])
def test_what_is_no_package_s_name_is_refused_bad(tmp_path, name):
    with pytest.raises(ModelError, match="not a package's name"):
        assembled(name, cache_dir=tmp_path)


@pytest.mark.real
def test_the_embedded_model_is_the_real_one_good():
    header = read(embedded_model())
    assert (header.architecture, header.parameters, header.vocabulary) == ("gemma3", 268_098_176, 262_144)
