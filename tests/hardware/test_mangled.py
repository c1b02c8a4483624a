"""Trees that make no sense are read all the same: whatever is mangled, nothing raises."""

from __future__ import annotations

import contextlib
import errno
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.doctor import examine
from orchestrator.errors import DeviceMissing
from orchestrator.hardware import GpuMemory, Ran, Watch, choose, detect
from tests.hardware.captured import NAMES, CapturedTree, Programs, files, load, unfold

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


FAULTS = [
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    PermissionError(errno.EACCES, "Permission denied"),
    IsADirectoryError(errno.EISDIR, "Is a directory"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ELOOP, "Too many levels of symbolic links"),
]


@st.composite
def mangled(draw: st.DrawFn, content: bytes) -> bytes | OSError:
    """Draw something else than a file's content: a fault, a part of it, noise, or another number."""
    number = draw(st.one_of(st.integers(), st.just(10**400)))
    name = content.split(b" ")[0]
    return draw(
        st.one_of(
            st.sampled_from(FAULTS),
            st.integers(0, len(content)).map(lambda end: content[:end]),
            st.binary(max_size=40),
            st.sampled_from([b"%d\n" % number, b"%b %d\n" % (name, number), b"0x%d" % number]),
        )
    )


@settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_mangled_machine_is_survived_ugly(data, tmp_path):
    name = data.draw(st.sampled_from(NAMES))
    root = tmp_path / name
    tree = CapturedTree(root, load(name)) if root.exists() else unfold(name, root)
    content = files(load(name))
    for path in data.draw(st.lists(st.sampled_from(sorted(content)), max_size=8, unique=True)):
        tree.overlay[path] = data.draw(mangled(content[path].encode()))
    check(tree, Programs(load(name)))


@settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
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
