"""The third engine of docs/how-to/add-an-engine.md, written from the page and run as an installed plug-in."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gguf_files

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "how-to" / "add-an-engine.md").read_text()

CONNECT = """
import sys, orchestrator
from orchestrator.source import probe
print(probe(sys.argv[1], "k").at.dialect.name)
with orchestrator.connect(sys.argv[1], key="k") as model:
    print(model.generate("x", max_tokens=1).text())
"""


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"the page has {len(found)} blocks of {language}"
    return found[0]


class Stranger:
    """Somebody else's package beside ours, as pip would have installed it, and their program on PATH."""

    def __init__(self, root: Path) -> None:
        self.root = root
        packages, programs = root / "site-packages", root / "bin"
        info = packages / "toy_backend-1.0.dist-info"
        for folder in (info, programs):
            folder.mkdir(parents=True)
        (packages / "toy_backend.py").write_text(block("python"))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            block("toml")
            .replace('[project.entry-points."orchestrator.backends"]', "[orchestrator.backends]")
            .replace('"', "")
        )
        program = programs / "toy-engine"
        program.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests" / "fakes" / "toy_engine.py"}" "$@"\n'
        )
        program.chmod(0o755)
        gguf_files.tiny_llama(root / "tiny.gguf")
        self.profile = root / "my-toy.yaml"
        self.write("model: tiny.gguf\nbackend: toy\ncontext: 128\ntoy: {threads: 3}\n")
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(packages),
            "PATH": f"{programs}:/usr/bin:/bin",
            "TOY_KEY": "left in the shell",
        }

    def write(self, text: str) -> None:
        self.profile.write_text(text)

    def family(self) -> None:
        """Make two engines of the one, as a later version of their package would."""
        module = self.root / "site-packages" / "toy_backend.py"
        classes = [f'class Toy{size.title()}(Toy):\n    name = "toy-{size}"\n' for size in ("big", "small")]
        module.write_text("\n\n".join([module.read_text(), *classes]))
        self.register("toy-big = toy_backend:ToyBig", "toy-small = toy_backend:ToySmall")

    def register(self, *lines: str) -> None:
        info = self.root / "site-packages" / "toy_backend-1.0.dist-info"
        (info / "entry_points.txt").write_text("\n".join(["[orchestrator.backends]", *lines]))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.call("-m", "orchestrator", *words)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            env=self.environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def stranger(tmp_path: Path) -> Stranger:
    return Stranger(tmp_path)


def test_the_engine_of_the_page_is_listed_good(stranger: Stranger) -> None:
    done = stranger.run("engines", "--json")
    assert done.returncode == 0, done.stderr
    toy = next(engine for engine in json.loads(done.stdout)["engines"] if engine["name"] == "toy")
    assert toy["problem"] is None
    assert toy["devices"] == ["cpu"]
    assert toy["argv"] == [str(stranger.root / "bin" / "toy-engine")]
    assert not toy["installable"]


def test_the_engine_of_the_page_answers_good(stranger: Stranger) -> None:
    done = stranger.run("run", str(stranger.profile), "one two three", "--max-tokens", "3", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"] == "toy0 toy1 toy2 "
    assert answer["usage"]["prompt_tokens"] == 3
    assert (answer["backend"], answer["model"]) == ("toy", "my-toy")


def test_it_is_offered_the_models_that_it_reads_good(stranger: Stranger) -> None:
    done = stranger.run("models", str(stranger.root), "--engine", "toy", "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"]
    assert model["engines"] == ["llama-server", "toy"]


def test_an_engine_that_is_not_installed_has_no_models_bad(stranger: Stranger) -> None:
    done = stranger.run("models", str(stranger.root), "--engine", "toyy")
    assert done.returncode == 2
    assert "no engine named 'toyy' is installed; did you mean toy?" in done.stderr


def test_a_running_one_is_known_and_spoken_to_in_its_own_words_good(stranger: Stranger) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [str(stranger.root / "bin" / "toy-engine"), "--listen", f"127.0.0.1:{port}", "--name", "m"]
    with subprocess.Popen(
        [*program, "--weights", str(stranger.root / "tiny.gguf")],
        env={**stranger.environ, "TOY_KEY": "k"},
        stderr=subprocess.PIPE,
        text=True,
    ) as engine:
        try:
            assert engine.stderr is not None
            assert engine.stderr.readline() == "listening\n"
            asked = stranger.call("-c", CONNECT, f"http://127.0.0.1:{port}")
        finally:
            engine.kill()
    assert asked.stdout.split() == ["toy", "toy0"], asked.stderr


def test_several_of_one_module_share_a_section_good(stranger: Stranger) -> None:
    stranger.family()
    stranger.write("model: tiny.gguf\nbackend: toy-big\ntoy: {threads: 3}\n")
    done = stranger.run("plan", str(stranger.profile), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["argv"][-2:] == ["--threads", "3"]
    stranger.write("model: tiny.gguf\nbackend: toy-big\ntoy: {threads: 3}\ntoy-big: {threads: 4}\n")
    assert json.loads(stranger.run("plan", str(stranger.profile), "--json").stdout)["argv"][-1] == "4"
    stranger.write("model: tiny.gguf\nbackend: toy-big\ntoy: {thread: 3}\n")
    assert "did you mean threads?" in stranger.run("check", str(stranger.profile)).stderr
    found = json.loads(stranger.run("models", str(stranger.root), "--engine", "toy-small", "--json").stdout)
    assert found["models"][0]["engines"] == ["llama-server", "toy"]
    properties = json.loads(stranger.run("schema").stdout)["properties"]
    assert properties["toy"]["properties"] == properties["toy-big"]["properties"]


def test_names_alone_make_no_family_of_two_modules_bad(stranger: Stranger) -> None:
    stranger.register("llama-box = toy_backend:Toy")
    found = json.loads(stranger.run("models", str(stranger.root), "--json").stdout)
    assert found["models"][0]["engines"] == ["llama-box", "llama-server"]
    stranger.write("model: tiny.gguf\nbackend: llama-server\nllama: {}\n")
    done = stranger.run("check", str(stranger.profile))
    assert done.returncode == 2
    assert "llama: is not a known key" in done.stderr


def test_packages_that_bring_no_engine_harm_no_other_ugly(stranger: Stranger) -> None:
    """One can't be read, one raises what no import should, one is a module, one is of an older version."""
    packages = stranger.root / "site-packages"
    (packages / "raises").mkdir()
    (packages / "raises" / "__init__.py").write_text("raise TypeError('of another Python')\n")
    (packages / "old.py").write_text("class Old:\n    name = 'toy-old'\n")
    stranger.register(
        *("toy-odd = not a value!", "toy-raises = raises.engine:Toy", "toy-module = json"),
        *("toy-old = old:Old", "toy = toy_backend:Toy"),
    )
    done = stranger.run("engines", "--json")
    assert done.returncode == 0, done.stderr
    told = {each["name"]: each["problem"] for each in json.loads(done.stdout)["engines"]}
    assert told["toy"] is None
    assert "(not a value!) can't be imported" in told["toy-odd"]
    assert "can't be imported: of another Python" in told["toy-raises"]
    assert "is no backend: it lacks name, dialect, " in told["toy-module"]
    assert "is no backend: it lacks dialect, " in told["toy-old"]
    stranger.environ["XDG_CACHE_HOME"] = str(stranger.root / "cache")
    for _ in range(2):  # asked, and remembered
        done = stranger.run("models", str(stranger.root), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["models"][0]["engines"] == ["llama-server", "toy"]
    assert stranger.run("plan", str(stranger.profile)).returncode == 0


def test_its_options_reach_its_command_line_good(stranger: Stranger) -> None:
    done = stranger.run("plan", str(stranger.profile), "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["argv"][-2:] == ["--threads", "3"]
    assert "TOY_*" in plan["environment"]["removed"]


def test_it_listens_on_loopback_and_in_a_container_on_that_ones_port_good(stranger: Stranger) -> None:
    def argv() -> list[str]:
        done = stranger.run("plan", str(stranger.profile), "--json")
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout)["argv"])

    own = argv()
    assert own[own.index("--listen") + 1].startswith("127.0.0.1:")
    client = stranger.root / "bin" / "docker"
    client.symlink_to("/bin/true")
    stranger.write("model: tiny.gguf\nbackend: toy\ncontainer: {image: toy/engine}\n")
    boxed = argv()
    assert boxed[:2] == [str(client), "run"]
    assert boxed[boxed.index("--listen") + 1].startswith("0.0.0.0:")
    assert boxed[boxed.index("--publish") + 1].startswith("127.0.0.1:")


def test_its_options_are_checked_bad(stranger: Stranger) -> None:
    stranger.write("model: tiny.gguf\nbackend: toy\ntoy: {thread: 3}\n")
    done = stranger.run("check", str(stranger.profile))
    assert done.returncode == 2
    assert "did you mean threads?" in done.stderr


def test_an_option_that_it_lacks_is_refused_by_name_bad(stranger: Stranger) -> None:
    stranger.write("model: tiny.gguf\nbackend: toy\nsampling: {top_k: 3}\n")
    done = stranger.run("run", str(stranger.profile), "x", "--max-tokens", "1")
    assert done.returncode == 4
    assert "toy does not offer top_k" in done.stderr


def test_its_known_failure_comes_with_its_advice_bad(stranger: Stranger) -> None:
    program = stranger.root / "bin" / "toy-engine"
    program.write_text("#!/bin/sh\necho these are no weights >&2\nexit 1\n")
    done = stranger.run("run", str(stranger.profile), "x")
    assert done.returncode == 3
    assert "advice: give the path of a model that toy reads" in done.stderr
