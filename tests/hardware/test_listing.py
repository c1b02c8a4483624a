"""What llama-server says about its devices, in outputs seen in public reports and here."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.hardware import LlamaDevice, parse_llama_devices, supported_kinds

MIB = 1 << 20

STRIX = """\
ggml_cuda_init: found 1 ROCm devices:
  Device 0: AMD Radeon(TM) Graphics, gfx1151 (0x1151), VMM: no, Wave Size: 32
Available devices:
  ROCm0: AMD Radeon(TM) Graphics (110511 MiB, 110357 MiB free)
"""
TWO = """\
Available devices:
  ROCm0: AMD Radeon RX 9070 (16304 MiB, 16000 MiB free)
  ROCm1: AMD Radeon 740M Graphics (15594 MiB, 15594 MiB free)
"""
CUDA = "Available devices:\n  CUDA0: NVIDIA GeForce RTX 3090 (24135 MiB, 23700 MiB free)\n"
VULKAN = """\
ggml_vulkan: Found 1 Vulkan devices:
ggml_vulkan: 0 = AMD Radeon VII (RADV VEGA20) (radv) | uma: 0 | fp16: 1 | warp size: 64
Available devices:
  Vulkan0: AMD Radeon VII (RADV VEGA20) (16128 MiB, 16128 MiB free)
"""
MIXED = """\
load_backend: loaded BLAS backend from /opt/llama/libggml-blas.so
Available devices:
  BLAS: OpenBLAS (0 MiB, 0 MiB free)
  CUDA0: NVIDIA GeForce RTX 3060 (12287 MiB, 11250 MiB free)
  RPC0: 192.0.2.1:50052 (8192 MiB, 8000 MiB free)
"""
NONE = "Available devices:\n  (none)\n"
BLIND = "ggml_cuda_init: failed to initialize ROCm: no ROCm-capable device is detected\n" + NONE


def test_rocm_device_good():
    assert parse_llama_devices(STRIX) == [
        LlamaDevice("ROCm0", "rocm", 0, "AMD Radeon(TM) Graphics", 110511 * MIB, 110357 * MIB)
    ]


def test_two_devices_keep_their_order_good():
    assert [(device.name, device.index) for device in parse_llama_devices(TWO)] == [
        ("ROCm0", 0),
        ("ROCm1", 1),
    ]


def test_brackets_in_a_name_belong_to_it_good():
    (device,) = parse_llama_devices(VULKAN)
    assert (device.description, device.kind) == ("AMD Radeon VII (RADV VEGA20)", "vulkan")


def test_other_backends_are_listed_as_such_good():
    assert [device.kind for device in parse_llama_devices(MIXED)] == ["other", "cuda", "other"]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (STRIX, {"cpu", "rocm"}), (CUDA, {"cpu", "cuda"}), (VULKAN, {"cpu", "vulkan"}),
        (MIXED, {"cpu", "cuda"}),
        (NONE, {"cpu"}), (BLIND, {"cpu", "rocm"}), ("", {"cpu"}), ("error: unknown argument", {"cpu"}),
    ],
)  # fmt: skip
def test_kinds_of_a_binary_good(text, kinds):
    assert supported_kinds(text) == kinds


def test_nothing_is_made_of_no_device_good():
    assert parse_llama_devices(NONE) == []


@settings(deadline=None)
@given(st.text())
def test_any_text_is_survived_ugly(text):
    parse_llama_devices("Available devices:\n" + text)
    supported_kinds(text)
