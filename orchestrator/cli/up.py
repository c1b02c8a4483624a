"""``orchestrator up``: start engines, serve them behind one address, and stop them again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.cli.progress import Progress
    from orchestrator.errors import PortTaken
    from orchestrator.home import RunFolder
    from orchestrator.switching import Switchable

M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def up(
    profiles: options.ProfileFiles,
    backend: options.Backend = None,
    sets: options.Set = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = options.PORT,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once all are ready; they run on in the background.")
    ] = False,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VAR", help="Variable with the key that clients must send; needed beyond loopback."
        ),
    ] = None,
    report: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> int:
    """Start engines and serve them behind one OpenAI-compatible address.

    Prints `ready NAME URL` on stdout once each answers. Ctrl-C stops everything, a second one at once.
    """
    from orchestrator.cli import loading
    from orchestrator.cli.faults import describe
    from orchestrator.cli.progress import Pipe

    key = _key(api_key_env)
    _refuse_open(host, key)
    with _signals_interrupt():
        if detach:
            from orchestrator.cli.detach import detach as start_detached

            _sweep()
            return start_detached(profiles, sets or [], backend, host, port, api_key_env)
        try:
            if report is None:
                wishes = loading.load_all(profiles, sets, backend)
                _sweep()
                return _serve(wishes, host, port, key, api_key_env, None)
            with contextlib.closing(Pipe(report)) as pipe:
                _write_into(os.devnull)  # until it has its log: the parent is told, and says it
                try:
                    wishes = loading.load_all(profiles, sets, backend)
                    return _serve(wishes, host, port, key, api_key_env, pipe)
                except Exception as error:
                    pipe.hear({"say": "error", "error": describe(error)})
                    raise
        except KeyboardInterrupt:
            return 0  # to be asked to end is no fault, however early


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let the signals that ask for the end do what Ctrl-C does; nohup means what it says."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    taken = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _sweep() -> None:
    from orchestrator.cli import console
    from orchestrator.cli.services import sweep
    from orchestrator.home import home

    for line in sweep(home()):
        console.err(line)


def _key(variable: str | None) -> str | None:
    from orchestrator.cli.faults import UsageError

    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise UsageError(
            f"up: --api-key-env: {variable} is {'empty' if key == '' else 'not set'}",
            advice=f"put the key into the environment: export {variable}=...",
        )
    return key


def _refuse_open(host: str, key: str | None) -> None:
    from orchestrator.cli.faults import UsageError
    from orchestrator.gateway import is_open

    if is_open(host, key):
        raise UsageError(
            f"up: --host: {host or 'every address'} is beyond loopback and needs a key",
            advice="put a key into an environment variable and name it with --api-key-env",
        )


def _prepare(wishes: list[Any], host: str, port: int, key: str | None) -> tuple[list[Switchable], Any]:
    """Make everything and decide everything; start nothing."""
    from orchestrator.cli.services import is_claimed
    from orchestrator.gateway import Gateway
    from orchestrator.home import home
    from orchestrator.switching import Switchable

    backends = [Switchable(wish, instance=wish.name) for wish in wishes]
    gateway = Gateway(
        {backend.profile.name: backend for backend in backends}, host=host, port=port, api_key=key
    )
    root = home()
    for backend in backends:
        if is_claimed(root, backend.profile.name):
            raise already_runs(backend.profile.name)
        backend.plan()
    return backends, gateway


def already_runs(name: str) -> Exception:
    """Return the error for a name that a living process has."""
    from orchestrator.errors import StartError

    return StartError(
        f"up: {name}: already runs",
        profile=name,
        advice=f"see `orchestrator ps`; stop it with `orchestrator down {name}`, or choose another name",
    )


def _by_whom(fault: PortTaken, port: int) -> PortTaken:
    """Return the error with the name of what has the port, where that is a service of ours."""
    from orchestrator.cli.services import running
    from orchestrator.errors import PortTaken

    for service in running():
        if service.port == port:
            names = service.names
            return PortTaken(
                f"up: port {port} is taken by {', '.join(names)}, served by pid {service.pid}",
                advice=f"stop it with `orchestrator down {' '.join(names)}`, or choose another port with "
                "--port (0 takes a free one)",
            )
    return fault


def _serve(
    wishes: list[Any],
    host: str,
    port: int,
    key: str | None,
    api_key_env: str | None,
    pipe: Progress | None,
) -> int:
    import uvloop

    from orchestrator.cli import logs_setup, progress
    from orchestrator.cli.service import Service
    from orchestrator.cli.services import SERVICE_LOG, service_folder, starting
    from orchestrator.errors import PortTaken
    from orchestrator.home import home

    folder = service_folder(home(), os.getpid())
    code = 1
    try:
        if not folder.acquire():  # our own pid's: only a program that holds it on purpose can do that
            raise already_runs(str(os.getpid()))
        folder.write(starting([wish.name for wish in wishes]))
        if pipe is not None:
            _write_into(folder.path / SERVICE_LOG)
            os.chdir("/")  # a process that runs for weeks must not keep a file system busy
        shown = progress.choose()
        quiet = isinstance(shown, progress.Live)
        logs_setup.configure(logs_setup.Level.WARNING if quiet else logs_setup.Level.INFO)
        told = shown if pipe is None else progress.Both(shown, pipe)
        backends, gateway = _prepare(wishes, host, port, key)
        _give_memory_back()
        try:
            code = uvloop.run(Service(backends, gateway, folder, told, api_key_env=api_key_env).run())
        except PortTaken as fault:
            raise _by_whom(fault, gateway.port) from fault
        finally:
            shown.close()
    except KeyboardInterrupt:
        code = 0
        raise
    finally:
        folder.release(remove=code == 0 or pipe is None or not _has_log(folder))
    return code


def _has_log(folder: RunFolder) -> bool:
    from orchestrator.cli.services import SERVICE_LOG

    log = folder.path / SERVICE_LOG
    return log.exists() and log.stat().st_size > 0


def _give_memory_back() -> None:
    """Let the C library give large blocks back at once, as it does until the first of them was freed.

    After that it keeps them in its heaps, where small ones pin them: each restart reads logs and answers in
    blocks of 256 KiB, and in weeks of those the process would grow without holding anything.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)


def _write_into(path: Any) -> None:
    """Send what this process says into a file from now on."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
