"""AMD's targets: spelling, what is integrated, and what a binary was built for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.hardware.targets import Evidence, built_for, judge, overridden, runs_on, target_name

NEW = Evidence("gfx1300", None, 0, vram=16 << 30, gtt=16 << 30, bank=16 << 30, unique_id=True, name="Radeon")


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (110001, "gfx1101"), (110000, "gfx1100"), (100306, "gfx1036"), (110501, "gfx1151"), (90012, "gfx90c"),
        (90010, "gfx90a"), (90402, "gfx942"), (90006, "gfx906"), (120001, "gfx1201"), (80003, "gfx803"),
        (0, None), (110099, None), (2**63, None), (119901, None),
    ],
)  # fmt: skip
def test_kernels_number_is_spelled_as_llvm_does_good(version, name):
    assert target_name(version) == name


@pytest.mark.parametrize(
    ("value", "name"),
    [("11.0.0", "gfx1100"), ("10.3.0", "gfx1030"), ("9.0.12", "gfx90c"), ("11", None), ("a.b.c", None)],
)
def test_override_names_a_target_good(value, name):
    assert overridden(value) == name


def test_size_alone_never_decides_good():
    assert judge(replace(NEW, vram=512 << 20, bank=512 << 20))[0] is False
    assert judge(replace(NEW, vram=96 << 30, bank=96 << 30))[0] is False
    assert judge(replace(NEW, gfx="gfx1101", vram=512 << 20))[0] is False
    assert judge(replace(NEW, gfx="gfx1151", vram=96 << 30, gtt=1 << 30))[0] is True


def test_unknown_silicon_needs_two_signs_good():
    small = replace(NEW, vram=512 << 20, bank=512 << 20, gtt=64 << 30)
    assert judge(small)[0] is False
    assert judge(replace(small, bank=small.gtt))[0] is True
    assert judge(replace(small, unique_id=False))[0] is True
    assert judge(replace(NEW, unique_id=False))[0] is False
    assert judge(replace(NEW, unique_id=False, name="AMD Radeon 990M Graphics"))[0] is True
    assert judge(replace(NEW, unique_id=False, bank=NEW.gtt + 1))[0] is False


def test_kernels_own_flag_decides_for_unknown_targets_good():
    assert judge(replace(NEW, core="11.5.4")) == (
        True, "graphics core 11.5.4 is integrated according to the kernel",
    )  # fmt: skip


def test_node_with_processor_cores_is_integrated_good():
    assert judge(replace(NEW, node_cpu_cores=4))[0] is True


def test_generic_code_runs_on_its_family_good():
    assert runs_on(frozenset({"gfx11-generic"}), "gfx1101")
    assert runs_on(frozenset({"gfx1101"}), "gfx1101")
    assert not runs_on(frozenset({"gfx11-generic", "gfx1100"}), "gfx1036")
    assert not runs_on(frozenset(), "gfx1101")


def test_targets_are_read_out_of_the_binary_good(tmp_path):
    program = tmp_path / "llama-server"
    program.write_bytes(b"\x7fELF")
    (tmp_path / "libggml-hip.so").write_bytes(
        b"\0__CLANG_OFFLOAD_BUNDLE__\0hipv4-amdgcn-amd-amdhsa--gfx1100\x10hipv4-amdgcn-amd-amdhsa--gfx90a:xnack-"
        b"hipv4-amdgcn-amd-amdhsa--gfx1101abc hipv4-amdgcn-amd-amdhsa--gfx10-3-generic"
    )
    assert built_for(program) == {"gfx1100", "gfx90a", "gfx1101", "gfx10-3-generic"}


def test_static_binary_is_looked_into_itself_good(tmp_path):
    program = tmp_path / "llama-server"
    program.write_bytes(b"....amdgcn-amd-amdhsa--gfx1030....")
    assert built_for(program) == {"gfx1030"}


@pytest.mark.parametrize("content", [b"", b"nothing"])
def test_binary_without_targets_has_none_ugly(tmp_path, content):
    program = tmp_path / "llama-server"
    program.write_bytes(content)
    assert built_for(program) == frozenset()
    assert built_for(tmp_path / "missing") == frozenset()
    assert built_for(tmp_path) == frozenset()
