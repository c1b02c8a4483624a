"""What doctor finds on captured machines, and on machines that are wrong in one way."""

from __future__ import annotations

import socket
import sys

import pytest

from orchestrator.backend import Binary
from orchestrator.doctor import Engine, blocked, examine, exit_code, look_at
from orchestrator.hardware import Ran, parse_llama_devices
from tests.hardware.captured import NAMES, Programs, load, unfold, write

ROCM = Engine(
    "llama-server",
    "/opt/llama/llama-server",
    "PATH",
    "8821 (4adac43f6)",
    frozenset({"cpu", "rocm"}),
    tuple(
        parse_llama_devices(
            "Available devices:\n  ROCm0: AMD Radeon RX 7800 XT (16368 MiB, 15000 MiB free)\n"
        )
    ),
)
PLAIN = Engine("llama-server", "/usr/bin/llama-server", "PATH", devices=())
LIMITS = {"nofile": 65536, "nproc": -1, "as": -1}


def look(name, root, environ=None, **keywords):
    keywords = {"limits": LIMITS, **keywords}
    return examine(unfold(name, root), Programs(load(name)), environ or {}, **keywords)


def about(findings, subject):
    return [finding for finding in findings if finding.subject == subject]


def bad(findings):
    return [
        f"{finding.level} {finding.subject}"
        for finding in findings
        if finding.level in {"warning", "blocker"}
    ]


@pytest.mark.parametrize("name", NAMES)
def test_captured_machine_has_the_expected_findings_good(name, tmp_path):
    findings = look(name, tmp_path)
    expected = load(name)["expect"]["findings"]
    found = [f"{finding.level} {finding.subject}" for finding in findings]
    assert [line for line in expected if line not in found] == []
    assert bad(findings) == [line for line in expected if line.startswith(("warning", "blocker"))]
    assert blocked(findings) == any(line.startswith("blocker") for line in expected)
    assert exit_code(findings) == blocked(findings)
    for finding in findings:
        assert finding.command or finding.level in {"ok", "info"}
        assert not finding.message.endswith(".")


# -- permissions ------------------------------------------------------------------------------------------


def test_forbidden_devices_name_user_and_group_good(tmp_path):
    findings = look("permission-denied", tmp_path)
    for path in ("/dev/kfd", "/dev/dri/renderD128"):
        (finding,) = about(findings, path)
        assert finding.message == "ada may not open it: it belongs to the group render"
        assert finding.command == "sudo usermod -aG render ada, then log out and in again"


def test_group_joined_after_login_asks_for_a_new_login_good(tmp_path):
    tree = unfold("permission-denied", tmp_path)
    write(tmp_path, "etc/group", "video:x:44:ada\nrender:x:993:bob,ada\nbroken\n")
    (finding,) = about(examine(tree, None, {}, limits=LIMITS), "/dev/kfd")
    assert finding.message.endswith("which ada joined after this session began")
    assert finding.command == "log out and in again"


def test_container_is_told_its_flags_good(tmp_path):
    (finding,) = about(look("container-without-kfd", tmp_path), "/dev/kfd")
    assert finding.level == "warning"
    assert "--device /dev/kfd --device /dev/dri" in finding.command


def test_missing_kfd_outside_a_container_blocks_bad(tmp_path):
    tree = unfold("rx7900xtx", tmp_path)
    (tmp_path / "dev/kfd").unlink()
    (finding,) = about(examine(tree, None, {}, limits=LIMITS), "/dev/kfd")
    assert (finding.level, finding.command) == ("blocker", "sudo modprobe amdgpu && sudo dmesg | grep -i kfd")


# -- drivers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "vendor", "expected"),
    [
        ("nouveau", "0x10de", "blocker"), (None, "0x10de", "blocker"), (None, "0x1002", "blocker"),
        ("radeon", "0x1002", "warning"), ("vfio-pci", "0x1002", "info"), ("vfio-pci", "0x10de", "info"),
    ],
)  # fmt: skip
def test_drivers_that_can_not_compute_are_said_bad(driver, vendor, expected, tmp_path):
    device = "sys/bus/pci/devices/0000:05:00.0"
    for name, text in {"vendor": vendor, "device": "0x1234", "class": "0x030000"}.items():
        write(tmp_path, f"{device}/{name}", text)
    write(tmp_path, f"{device}/uevent", f"DRIVER={driver}\n" if driver else "PCI_CLASS=30000\n")
    (finding,) = about(examine(tmp_path, None, {}, limits=LIMITS), "kernel driver")
    assert finding.level == expected
    assert "0000:05:00.0" in finding.message


# -- the integrated GPU, masks, targets --------------------------------------------------------------------


def test_integrated_gpu_in_first_place_is_a_warning_good(tmp_path):
    (finding,) = about(look("7800x3d-then-rx7800xt", tmp_path), "integrated GPU")
    assert "is HIP's device 0, before AMD Radeon RX 7800 XT" in finding.message
    assert finding.command == "export ROCR_VISIBLE_DEVICES=GPU-644950a4e5f60a09"


def test_masks_of_the_shell_are_warned_of_good(tmp_path):
    findings = look("rx7900xtx", tmp_path, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert [finding.command for finding in about(findings, "masks")] == [
        "unset CUDA_VISIBLE_DEVICES", "unset HIP_VISIBLE_DEVICES",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "level"), [("11.0.0", "warning"), ("11.0.1", "info"), ("gfx1100", "warning"), ("", None)]
)
def test_override_is_judged_by_the_card_good(value, level, tmp_path):
    findings = about(look("rx7800xt-then-9950x", tmp_path, {"HSA_OVERRIDE_GFX_VERSION": value}), "masks")
    assert [finding.level for finding in findings] == ([level] if level else [])


def test_rocblas_without_the_target_is_a_warning_good(tmp_path):
    tree = unfold("rx7800xt-then-9950x", tmp_path)
    for gfx in ("gfx1100", "gfx1102"):
        write(tmp_path, f"opt/rocm/lib/rocblas/library/TensileLibrary_lazy_{gfx}.dat", "")
    rocm = about(examine(tree, None, {}, limits=LIMITS), "rocm")
    assert [finding.level for finding in rocm] == ["ok", "info", "warning"]
    assert "no code for gfx1101" in rocm[2].message
    write(tmp_path, "opt/rocm/lib/rocblas/library/TensileLibrary_lazy_gfx1101.dat", "")
    assert [finding.level for finding in about(examine(tree, None, {}, limits=LIMITS), "rocm")] == [
        "ok",
        "info",
    ]


# -- engines -----------------------------------------------------------------------------------------------


def with_engines(root, *binaries, name="rx7800xt-then-9950x", environ=None):
    return about(look(name, root, environ, binaries=binaries), "llama-server")


def test_engine_that_fits_is_fine_good(tmp_path):
    (finding,) = with_engines(tmp_path, ROCM)
    assert finding.message == (
        "version 8821 (4adac43f6), /opt/llama/llama-server (PATH); devices: ROCm0 AMD Radeon RX 7800 XT"
    )


def test_engine_without_the_runtime_leaves_the_card_idle_bad(tmp_path):
    findings = with_engines(tmp_path, PLAIN)
    assert [finding.level for finding in findings] == ["ok", "warning"]
    assert findings[1].message == "it was built without rocm, so AMD Radeon RX 7800 XT (gfx1101) stays idle"
    assert findings[1].command == "install a build for rocm and put it on PATH"
    (_, named) = with_engines(tmp_path / "b", changed(PLAIN, variable="SOME_PATH"))
    assert named.command == "install a build for rocm and name it in SOME_PATH"


def changed(engine, **fields):
    from dataclasses import replace

    return replace(engine, **fields)


def test_engine_that_sees_no_card_blocks_unless_masked_bad(tmp_path):
    blind = changed(ROCM, devices=())
    assert with_engines(tmp_path / "a", blind)[1].level == "blocker"
    masked = with_engines(tmp_path / "b", blind, environ={"HIP_VISIBLE_DEVICES": "-1"})
    assert masked[1].level == "warning"


def test_engine_that_can_not_list_devices_is_not_judged_by_it_good(tmp_path):
    assert [finding.level for finding in with_engines(tmp_path, changed(ROCM, devices=None))] == ["ok"]


def test_engine_of_one_build_is_not_told_to_be_another_good(tmp_path):
    vllm = Engine("vllm-cpu", "/opt/vllm/python", "PATH", kinds=frozenset({"cpu"}))
    findings = look("rx7800xt-then-9950x", tmp_path, binaries=[vllm])
    assert [finding.level for finding in about(findings, "vllm-cpu")] == ["ok"]


def test_engine_for_another_target_blocks_bad(tmp_path):
    other = changed(ROCM, targets=frozenset({"gfx1100", "gfx1030"}))
    assert (
        with_engines(tmp_path / "a", other)[1].message
        == "it was built for gfx1030, gfx1100, and the GPU is gfx1101"
    )
    overridden = with_engines(tmp_path / "b", other, environ={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"})
    assert [finding.level for finding in overridden] == ["ok"]
    generic = changed(ROCM, targets=frozenset({"gfx11-generic"}))
    assert [finding.level for finding in with_engines(tmp_path / "c", generic)] == ["ok"]


def test_no_engine_blocks_bad(tmp_path):
    findings = look("nothing", tmp_path, binaries=[])
    assert bad(findings) == ["blocker engines"]
    broken = Engine("vllm-cpu", problem="it is not installed", advice="orchestrator engines install vllm-cpu")
    assert bad(look("nothing", tmp_path / "b", binaries=[broken])) == ["blocker vllm-cpu"]
    assert bad(look("nothing", tmp_path / "c", binaries=[PLAIN, broken])) == ["warning vllm-cpu"]


def test_engine_is_looked_at_good(tmp_path):
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "if '--version' in sys.argv: print('version: 8821 (4adac43f6)\\nbuilt with GNU', file=sys.stderr)\n"
        "else: print('ggml_cuda_init: failed to initialize ROCm: none', file=sys.stderr); "
        "print('Available devices:\\n  (none)')\n"
    )
    program.chmod(0o755)
    engine = look_at("llama-server", Binary((str(program),), "PATH"))
    assert engine == Engine(
        "llama-server", str(program), "PATH", "8821 (4adac43f6)", frozenset({"cpu", "rocm"}), ()
    )


@pytest.mark.parametrize(
    ("ran", "problem"),
    [
        (Ran(127, err="x\nerror while loading shared libraries: libamdhip64.so.7\n"),
         "it does not run: error while loading shared libraries: libamdhip64.so.7"),
        (Ran(None, err="no answer within 20 s"), "it gave no answer within 20 s"),
        (Ran(None, err="permission denied"), "it does not run: permission denied"),
        (Ran(1), "it does not run: exit code 1"),
    ],
)  # fmt: skip
def test_engine_that_does_not_run_says_why_bad(ran, problem):
    engine = look_at("llama-server", Binary(("/nowhere/llama-server",), "PATH"), lambda argv, timeout: ran)
    assert (engine.problem, engine.version) == (problem, None)
    assert ("busy" in (engine.advice or "")) == ("no answer" in problem)


# -- memory, limits, disk, ports --------------------------------------------------------------------------


def test_users_of_gpu_memory_are_named_good(tmp_path):
    (finding,) = about(look("two-rx7900xtx", tmp_path), "GPU memory")
    assert finding.message == (
        "GPU-398a3f843a146602: 20.4 GiB of 24.0 GiB in use by 4242 (llama-server, 20.4 GiB)"
    )


def test_little_memory_is_a_warning_bad(tmp_path):
    tree = unfold("nothing", tmp_path)
    write(tmp_path, "proc/meminfo", "MemTotal: 4000000 kB\nMemAvailable: 900000 kB\n")
    assert bad(examine(tree, None, {}, limits=LIMITS)) == ["warning memory"]


@pytest.mark.parametrize(
    ("limits", "command"),
    [
        ({"nofile": 1024}, "ulimit -n 65536"), ({"nproc": 100}, "ulimit -u 4096"),
        ({"as": 1 << 30}, "ulimit -v unlimited"),
    ],
)  # fmt: skip
def test_tight_limits_are_warned_of_bad(limits, command, tmp_path):
    (finding,) = about(look("nothing", tmp_path, limits=limits), "limits")
    assert (finding.level, finding.command) == ("warning", command)


@pytest.mark.parametrize(("free", "level"), [(500 << 20, "blocker"), (5 << 30, "warning"), (50 << 30, "ok")])
def test_disk_space_is_judged_for_each_folder_good(free, level, tmp_path):
    folders = {"state": tmp_path / "not" / "there" / "yet"}
    findings = look("nothing", tmp_path / "root", folders=folders, disk_free=lambda folder: free)
    (finding,) = about(findings, "disk state")
    assert finding.level == level
    assert str(tmp_path) in finding.message


def test_folder_that_is_a_file_blocks_ugly(tmp_path):
    (tmp_path / "file").write_text("x")
    findings = look("nothing", tmp_path / "root", folders={"cache": tmp_path / "file"})
    assert bad(findings) == ["blocker disk cache"]


def test_taken_port_is_a_warning_good(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (finding,) = about(look("nothing", tmp_path, ports={port: None}), f"port {port}")
        assert (finding.level, finding.command) == ("warning", f"ss -ltnp 'sport = :{port}'")


def test_a_port_that_we_serve_on_ourselves_is_fine_good(tmp_path):
    found = look("nothing", tmp_path, ports={8080: "gemma, qwen"}, port_free=lambda port: False)
    (finding,) = about(found, "port 8080")
    assert (finding.level, finding.message, finding.command) == ("ok", "serves gemma, qwen", None)


def test_free_port_is_fine_good(tmp_path):
    (finding,) = about(
        look("nothing", tmp_path, ports={8080: None}, port_free=lambda port: True), "port 8080"
    )
    assert finding.level == "ok"


def test_this_machine_is_examined_without_raising_good(tmp_path):
    assert examine(folders={"state": tmp_path}, ports={0: None, 70000: None})
