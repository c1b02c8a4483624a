"""Known failure messages of engines, and what to do about each: how they are found, and those of drivers.

A table is searched from its top: what is told in passing comes below what ends an engine. Every row has a
message that was really seen, with its source, in ``tests/data/engine_messages``.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backends.process import Exit

LOG_LINES = 400  # vLLM's cause stands above two tracebacks

# told by a healthy engine too, with any driver's error at the end: it goes on with ordinary memory
_HARMLESS = re.compile(r"^.*of pinned memory:.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """One known way to fail.

    Attributes:
        kind: a short name, the same for all engines that fail like this.
        pattern: a regular expression searched in the log's last lines.
        advice: what to do, one line.
        permanent: no retry mends it.

    """

    kind: str
    pattern: re.Pattern[str]
    advice: str
    permanent: bool = True


def known(kind: str, pattern: str, advice: str, *, permanent: bool = True) -> Failure:
    """Build a `Failure`; the pattern is searched without regard to case."""
    return Failure(kind, re.compile(pattern, re.IGNORECASE), advice, permanent)


WRONG_PROCESSOR = known(
    "wrong-processor",
    r"illegal instruction",
    "it was compiled for another processor, or wrongly for this one: compile it here, or with another "
    "compiler; for llama-server, `args: [--no-repack]` may do",
)


def diagnose(failures: Iterable[Failure], log: str, ended: Exit | None = None) -> Failure | None:
    """Return the known failure that the log shows, the first of the table if it shows several, or the end."""
    told = _HARMLESS.sub("", log)
    found = next((failure for failure in failures if failure.pattern.search(told)), None)
    if found is None and ended is not None and ended.signal == signal.SIGILL:
        return WRONG_PROCESSOR
    return found


DEVICE_FAILURES: tuple[Failure, ...] = (
    known(
        "kfd-permission",
        r"/dev/kfd.*(permission denied|not permitted)",
        "no right to use the GPU: join the groups `render` and `video` and log in again; "
        "a container needs the devices /dev/kfd and /dev/dri",
    ),
    known(
        "no-kernels-for-gpu",
        r"invalid device function|no kernel image is available|rocblas(lt)? error: cannot read",
        "this build has no kernels for a card's gfx target: see `orchestrator doctor` for the target, take a "
        "build made for it, keep an integrated GPU out with `gpus`, or set HSA_OVERRIDE_GFX_VERSION in `env` "
        "if your card is known to need it",
    ),
    known(
        "driver-too-old",
        r"driver version is insufficient|unsupported display driver",
        "the GPU driver is too old for this build: update the driver (and reboot), or take a build for it",
    ),
    known(
        "gpu-fault",
        r"reason ?: ?gpu hang|memory access fault by gpu|devicelost|illegal memory access"
        r"|unspecified launch failure",
        "the GPU or its driver failed; when it happens again, see dmesg, check power and temperature, "
        "lower `context`, or update the driver",
        permanent=False,
    ),
    known(
        "missing-library",
        r"error while loading shared libraries|ImportError: \S+: cannot open shared object file",
        "a library is missing: install it (for lib*hip*, lib*roc* ROCm, for libcu* CUDA), "
        "or reinstall the engine together with its libraries",
    ),
    known(
        "no-gpu",
        r"no (ROCm|CUDA)-capable device|no (HIP|CUDA) GPUs are available|failed to infer device type",
        "no GPU can be used: run `orchestrator doctor`, and check `gpus` and the masks in `env`",
    ),
)
