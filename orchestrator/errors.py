"""The error tree: every fault that a caller can meet, with what to do about it.

    OrchestratorError
    |- ProfileError(problems)                                       exit 2
    |- ModelError(path, offset)                                     exit 2
    |  |- NotAModel            not a model file at all, or a broken one
    |  |- UnsupportedModel     a model, but not one that can be served like this
    |  '- NotFetched(download)  it is not on this machine yet, but can be got or made
    |- BackendError(profile, log_tail, advice)                      exit 3
    |  |- UnknownBackend, BinaryMissing, DeviceMissing, DoesNotFit
    |  |- StartError
    |  |  '- PortTaken, ExitedEarly(code, signal), StartTimeout, StartStalled, StartCancelled
    |  |- Crashed(code, signal, uptime)
    |  |- GaveUp(attempts)
    |  |- StopFailed(survivors)
    |  '- SwitchRefused, SwitchFailed(back), EngineReplaced
    |- RequestError                                                 exit 4
    |  '- Unreachable, BadStatus(status), StreamInterrupted(partial), ProtocolError, Stalled
    '- Incomparable(reasons)                                        exit 5

Messages are lower case, start with their context (``profile:``, ``gguf:``, ``llama-server:``) and end
without a full stop. `advice` says what to do next. Only the command line turns errors into text and
exit codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


class OrchestratorError(Exception):
    """The root of everything this package raises on purpose.

    Attributes:
        advice: what the user can do about it, or None.
        measured: of a measurement that it ended, what was measured until then; else None.

    """

    exit_code: ClassVar[int] = 1
    measured: Any = None

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


# -- profiles ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault in a profile, at the place where its author can mend it.

    Attributes:
        where: file name, or what stands for it (``--set``).
        line: 1-based line, 0 when there is none.
        column: 1-based column, 0 when there is none.
        key: dotted key, empty when the fault is not about one.
        message: what is wrong, lower case, without a full stop.

    """

    where: str
    line: int
    column: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.where}:{self.line}:{self.column}" if self.line else self.where
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class ProfileError(OrchestratorError):
    """A profile can't be used; `problems` holds every fault found, in file order."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, advice: str | None = None) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"profile: {problem}" for problem in self.problems), advice=advice)


# -- models -----------------------------------------------------------------------------------------


class ModelError(OrchestratorError):
    """A model can't be read or used.

    Attributes:
        path: the file or folder, or None when the model was named otherwise.
        offset: byte offset of the fault in the file, or None.

    """

    exit_code = 2

    def __init__(
        self, message: str, *, path: Path | None = None, offset: int | None = None, advice: str | None = None
    ) -> None:
        super().__init__(message, advice=advice)
        self.path = path
        self.offset = offset


class NotAModel(ModelError):
    """The file is missing, broken or something else than a model."""


class UnsupportedModel(ModelError):
    """A model, but not one that the chosen engine or option can serve."""


class NotFetched(ModelError):
    """The model, or the form of it that is wanted, is not on this machine yet, but can be got or made.

    Attributes:
        path: where it will be.
        download: what gets it: a `backend.Lacking`, such as `model_hub.Download`.

    """

    def __init__(self, message: str, *, path: Path, download: Any, advice: str | None = None) -> None:
        super().__init__(message, path=path, advice=advice)
        self.path: Path = path
        self.download = download


# -- backends ---------------------------------------------------------------------------------------


class BackendError(OrchestratorError):
    """An engine is missing, could not be started, or was lost.

    Attributes:
        profile: the profile's name, or None.
        log_tail: the engine's last log lines, oldest first.

    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        profile: str | None = None,
        log_tail: Sequence[str] = (),
        advice: str | None = None,
    ) -> None:
        super().__init__(message, advice=advice)
        self.profile = profile
        self.log_tail = tuple(log_tail)


class UnknownBackend(BackendError):
    """No installed package offers a backend of that name."""


class BinaryMissing(BackendError):
    """The engine's program was not found, or is not what it should be."""


class DeviceMissing(BackendError):
    """A GPU was asked for and none can be used."""


class DoesNotFit(BackendError):
    """The model with its context does not fit into the memory there is."""


class StartError(BackendError):
    """The engine did not become ready."""


class PortTaken(StartError):
    """Another process owns the port that the engine should have had."""


def describe_exit(code: int | None, signal: int | None = None) -> str:
    """Say how a process ended, ``exit code 1`` or ``killed by SIGKILL``; `subprocess` has signals below 0."""
    import signal as signals

    if code is not None and code < 0:
        signal, code = -code, None
    if signal is not None:
        try:
            return f"killed by {signals.Signals(signal).name}"
        except ValueError:
            return f"killed by signal {signal}"
    return "ended for an unknown reason" if code is None else f"exit code {code}"


class ExitedEarly(StartError):
    """The engine ended before it was ready.

    Attributes:
        code: its exit code, or None when a signal ended it.
        signal: the signal's number, or None.

    """

    def __init__(
        self,
        message: str,
        *,
        code: int | None,
        signal: int | None,
        profile: str | None = None,
        log_tail: Sequence[str] = (),
        advice: str | None = None,
    ) -> None:
        super().__init__(message, profile=profile, log_tail=log_tail, advice=advice)
        self.code = code
        self.signal = signal


class StartTimeout(StartError):
    """`timeouts.start` passed before the engine was ready."""


class StartStalled(StartError):
    """The engine was alive but made no progress for `timeouts.stall`."""


class StartCancelled(StartError):
    """The start was called off by its caller."""


class Crashed(BackendError):
    """A ready engine ended without being asked to.

    Attributes:
        code: its exit code (0 too is a crash), or None when a signal ended it.
        signal: the signal's number, or None.
        uptime: seconds for which it had been ready.

    """

    def __init__(
        self,
        message: str,
        *,
        code: int | None,
        signal: int | None,
        uptime: float,
        profile: str | None = None,
        log_tail: Sequence[str] = (),
        advice: str | None = None,
    ) -> None:
        super().__init__(message, profile=profile, log_tail=log_tail, advice=advice)
        self.code = code
        self.signal = signal
        self.uptime = uptime


class GaveUp(BackendError):
    """The restart budget is spent.

    Attributes:
        attempts: restarts tried within the window.

    """

    def __init__(
        self,
        message: str,
        *,
        attempts: int,
        profile: str | None = None,
        log_tail: Sequence[str] = (),
        advice: str | None = None,
    ) -> None:
        super().__init__(message, profile=profile, log_tail=log_tail, advice=advice)
        self.attempts = attempts


class StopFailed(BackendError):
    """Processes or GPU memory survived a stop.

    Attributes:
        survivors: process ids that are still there.

    """

    def __init__(
        self,
        message: str,
        *,
        survivors: Sequence[int],
        profile: str | None = None,
        log_tail: Sequence[str] = (),
        advice: str | None = None,
    ) -> None:
        super().__init__(message, profile=profile, log_tail=log_tail, advice=advice)
        self.survivors = tuple(survivors)


class SwitchRefused(BackendError):
    """A change of the engine can't begin now; nothing was touched."""


class SwitchFailed(BackendError):
    """The new engine did not come up.

    Attributes:
        back: whether the engine before it serves (on, or again).

    """

    back: bool = False


class EngineReplaced(BackendError):
    """The engine at an endpoint takes no more requests, since another one has taken its place; ask anew."""


# -- requests ---------------------------------------------------------------------------------------


class RequestError(OrchestratorError):
    """One request failed; the server may well live on."""

    exit_code = 4


class Unreachable(RequestError):
    """No connection to the server, or none in time."""


class BadStatus(RequestError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status, or the code given inside a stream.
        body: the error object or text as the server sent it.

    """

    def __init__(self, message: str, *, status: int, body: object = None, advice: str | None = None) -> None:
        super().__init__(message, advice=advice)
        self.status = status
        self.body = body


class _CutShort(RequestError):
    """An answer of which only a part came.

    Attributes:
        partial: the text that had arrived.

    """

    def __init__(self, message: str, *, partial: str = "", advice: str | None = None) -> None:
        super().__init__(message, advice=advice)
        self.partial = partial


class StreamInterrupted(_CutShort):
    """The stream ended before its end."""


class ProtocolError(RequestError):
    """The server sent something that is not the protocol."""


class Stalled(_CutShort):
    """Nothing arrived for `timeouts.stall`, or the request outlasted `timeouts.request`."""


# -- comparisons ------------------------------------------------------------------------------------


class Incomparable(OrchestratorError):
    """Two measurements must not be compared, or one must not be believed.

    Attributes:
        reasons: why, one string each.
        voids: the rounds that were measured in vain, a line each: which one, of what, and why.

    """

    exit_code = 5

    def __init__(
        self,
        reasons: Sequence[str],
        *,
        context: str = "compare",
        voids: Sequence[str] = (),
        advice: str | None = None,
    ) -> None:
        self.reasons = tuple(reasons)
        self.voids = tuple(voids)
        super().__init__(f"{context}: {'; '.join(self.reasons)}", advice=advice)
