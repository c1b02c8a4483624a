"""What the short form ``container`` of a profile fills in: devices, groups, memory and mounts, and no more.

Only the chosen cards are given to the container, which is the kernel's doing and not a mask's; files are
mounted read-only, in the place that they have here, so that the engine's own arguments stay as they are.
"""

from __future__ import annotations

import csv
import grp
import io
import os
from collections.abc import Iterator
from pathlib import Path

from orchestrator import gguf_header
from orchestrator.backend import Plan
from orchestrator.profile_schema import Container

GROUPS = ("video", "render")
MASKS = {"rocm": "HIP_VISIBLE_DEVICES", "vulkan": "GGML_VK_VISIBLE_DEVICES"}


def renumbered(plan: Plan) -> dict[str, str]:
    """Return the mask for what is in the container: only the chosen cards, so they count from 0."""
    mask = MASKS.get(plan.device.kind)
    if mask is None or mask not in plan.device.env or mask in plan.profile.env:
        return {}
    return {mask: ",".join(str(at) for at in range(len(plan.device.gpus)))}


def options(plan: Plan, wish: Container) -> Iterator[str]:
    """Return the client's options for a plan."""
    yield from ("--rm", "--init")
    if wish.runtime != "nerdctl":  # which reads its log to show it; what we keep is enough otherwise
        yield from ("--log-driver", "none")
    yield from ("--ipc", "host") if wish.shm_size is None else ("--shm-size", wish.shm_size)
    yield from _devices(plan, wish.runtime)
    for target, source in mounts(plan).items():
        yield from ("--mount", _csv("type=bind", f"source={source}", f"target={target}", "readonly"))


def _devices(plan: Plan, runtime: str) -> Iterator[str]:
    amd = [gpu for gpu in plan.device.gpus if gpu.vendor == "amd"]
    nvidia = [gpu for gpu in plan.device.gpus if gpu.vendor == "nvidia"]
    if amd and plan.device.kind == "rocm":
        yield from ("--device", "/dev/kfd")
    for gpu in amd:  # only these cards: masks are for programs, this is the kernel's
        yield from ("--device", f"/dev/dri/{gpu.render_node}" if gpu.render_node else "/dev/dri")
    if amd and runtime == "podman":
        yield from ("--group-add", "keep-groups")  # numbers mean others in a user's own namespace
    elif amd:
        for name in GROUPS:
            yield from ("--group-add", group(name))
    if nvidia and runtime == "podman":
        for gpu in nvidia:
            yield from ("--device", f"nvidia.com/gpu={gpu.id}")
    elif nvidia:
        yield from ("--gpus", _csv(f"device={','.join(gpu.id for gpu in nvidia)}"))


def group(name: str) -> str:
    """Return a group's number on this machine, which an image need not have; its name where there is none."""
    try:
        return str(grp.getgrnam(name).gr_gid)
    except KeyError:
        return name


def mounts(plan: Plan) -> dict[str, str]:
    """Return what the container must see: its place there, the same as here -> where it really is."""
    found: dict[str, str] = {}
    named = (plan.model_path, plan.mmproj_path, *plan.lora_paths, plan.chat_template_path)
    for path in (path for path in named if path is not None and path.is_absolute()):
        parts = gguf_header.shards(path) if path.is_file() and path.suffix == ".gguf" else (path,)
        for part in parts:
            found[str(part)] = os.path.realpath(part)
        found |= _linked(path)
    return found


def _linked(folder: Path) -> dict[str, str]:
    """Return the files outside of a folder to which its links lead, as those of Hugging Face's cache do."""
    found: dict[str, str] = {}
    for inside, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(inside) / name
            if path.is_symlink():
                target = os.path.normpath(path.parent / path.readlink())
                if not Path(target).is_relative_to(folder):
                    found[target] = os.path.realpath(path)
    return found


def _csv(*fields: str) -> str:
    """Write fields as the clients read them: one with a comma is quoted."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
