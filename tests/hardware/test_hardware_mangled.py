"""Trees that make no sense are read all the same: whatever is mangled, nothing raises."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from captured import NAMES, CapturedTree, Programs, load, unfold
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.doctor import examine
from orchestrator.errors import DeviceMissing
from orchestrator.hardware import GpuMemory, Ran, Watch, choose, detect

KINDS = frozenset({"cpu", "rocm", "cuda", "vulkan"})


def check(tree: CapturedTree, run) -> None:
    machine = detect(tree, run)
    assert len({gpu.id for gpu in machine.gpus}) == len(machine.gpus)
    for gpu in machine.gpus:
        assert gpu.free >= 0
        assert gpu.id
    for kind in sorted(KINDS):
        choice = choose(machine, supported=frozenset({"cpu", kind}), environ={})
        assert not any(gpu.integrated for gpu in choice.gpus)
        for gpu in machine.gpus:
            with contextlib.suppress(DeviceMissing):
                chosen = choose(machine, kind, [gpu.id], supported=KINDS, environ={}).gpus
                assert gpu in chosen or kind == "cpu"
    watch = Watch(GpuMemory(tree, run), machine.gpus)
    watch.look({1})
    assert examine(tree, run, {}, limits={}, machine=machine)


def mangle(data: st.DataObject, path: Path, tree: CapturedTree) -> None:
    how = data.draw(
        st.sampled_from(["gone", "empty", "cut", "noise", "number", "folder", "loop", "denied", "fifo"])
    )
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    elif how == "noise":
        path.write_bytes(data.draw(st.binary(max_size=40)))
    elif how == "number":
        number = data.draw(st.one_of(st.integers(), st.just(10**400)))
        name = content.split(b" ")[0].decode("ascii", "replace")
        path.write_text(data.draw(st.sampled_from([f"{number}\n", f"{name} {number}\n", f"0x{number}"])))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "denied":
        tree.denied.add(str(path.relative_to(tree.root)))
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "loop":
            path.symlink_to(path.name)
        elif how == "fifo":
            os.mkfifo(path)


@settings(
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mangled_machine_is_survived_ugly(data, tmp_path):
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    name = data.draw(st.sampled_from(NAMES))
    tree = unfold(name, root)
    paths = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    for path in data.draw(st.lists(st.sampled_from(paths), max_size=8, unique=True)):
        mangle(data, path, tree)
    check(tree, Programs(load(name)))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(out=st.text(), code=st.sampled_from([0, 1, 2, None]))
def test_any_answer_of_nvidia_smi_is_survived_ugly(out, code, tmp_path):
    root = tmp_path / "root"
    tree = CapturedTree(root, {}) if root.exists() else unfold("nvidia-laptop", root)
    lines = f"GPU-1, {out}\n{out}\nGPU-1, a, b, c, d, e, f\nGPU-1, a, b, c, d, e, f\n"
    check(
        tree,
        lambda argv, timeout: Ran(code, lines if "query-gpu" in argv[1] else f"GPU-1, {out}, {out}", out),
    )


@pytest.mark.parametrize(
    "folder", ["sys", "sys/class/drm", "sys/class/kfd/kfd/topology/nodes", "proc", "dev"]
)
def test_folder_that_is_a_file_is_survived_ugly(folder, tmp_path):
    tree = unfold("two-rx7900xtx", tmp_path)
    shutil.rmtree(tmp_path / folder)
    (tmp_path / folder).write_text("x")
    check(tree, None)
