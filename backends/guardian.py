"""The guardian: parent of one engine, and the reason why no engine outlives the orchestrator.

Run as a program of its own (``python -I -S guardian.py FD``), on the standard library alone, so that it
starts in a few milliseconds and stays small. It owns: the engine's first process, everything that
descends from it (as a subreaper it inherits what double-forks or calls setsid), the engine's log with
its rotation, and the end of all of them.

The orchestrator talks to it over a socket, in frames of a marshalled dict (both ends are the same Python;
json alone would double the start-up):

    to the guardian      {"argv": [...], "env": {...}, "cwd": str, "log": path, "log_bytes": int,
                          "log_files": int, "grace": seconds, "stop_argv": [...], "clean_argv": [...],
                          "temporary": folder}
                                                once, first
                         {"stop": seconds}      TERM to the leader (or `stop_argv` is run), KILL to the tree
                                                after that long
    from the guardian    {"spawned": pid}  or  {"error": str, "errno": int}
                         {"exited": {"code": int|null, "signal": int|null}}
                         {"survivors": [pid, ...]}     the tree resists SIGKILL (each second)
                         {"gone": [pid, ...]}          nothing is left; these had to be killed; last words

The socket's end, for whatever reason, is the order to stop. What is not of the tree, such as a container, is
ended by `clean_argv`, which is run once the tree has ended, whatever ended it. `temporary` is made before the
engine, for its temporary files, and goes after it. Shared memory is given back by Python's resource trackers
once all others are dead, so these are killed a moment later.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # each import costs milliseconds and megabytes beside every engine
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
READ_BYTES = 1 << 18
PIPE_BYTES = 1 << 20  # a larger pipe lets a burst of log lines pass while we are busy elsewhere
LEFTOVER_GRACE = 1.0  # seconds for what a dead leader left behind, between TERM and KILL
CLEAN_GRACE = 20.0  # seconds for what is run at the end
ORPHAN_GRACE = 5.0  # seconds at most when the orchestrator is gone, as nobody waits for answers any more
TRACKER_GRACE = 1.0  # seconds for resource trackers, after all others were killed
TRACKER = b"multiprocessing.resource_tracker"


class ignoring:  # noqa: N801 - as contextlib.suppress, which is dear to import
    """Let some errors pass."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self.errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self.errors)


def pack(message: dict[str, Any]) -> bytes:
    """Return a frame: the length in four bytes, and the message."""
    data = marshal.dumps(message)
    return len(data).to_bytes(4, "little") + data


def unpack(received: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Return the messages that have come whole, and the rest."""
    found = []
    while len(received) >= 4 and len(received) >= (end := 4 + int.from_bytes(received[:4], "little")):
        found.append(marshal.loads(received[4:end]))  # noqa: S302 - from our parent alone
        received = received[end:]
    return found, received


def read_proc(pid: int | str, name: str) -> bytes:
    """Return a file of ``/proc/PID``, empty when there is none; by pathlib it would double our memory."""
    with ignoring(OSError), open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123
        return file.read()
    return b""


def descendants(root: int) -> list[int]:
    """Return the pids of every living process below `root`, parents before their children; no zombies."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        # the program's name may hold spaces and brackets: count from the last bracket
        fields = read_proc(name, "stat").rpartition(b")")[2].split()
        if fields and fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def kill(pids: list[int], number: int) -> None:
    """Send a signal to each of `pids` that is still there."""
    for pid in pids:
        with ignoring(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def remove(folder: str) -> None:
    """Remove a folder and all that is in it, as far as that goes."""
    for inside, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):  # a link to a folder is one of `folders`
            with ignoring(OSError):
                os.unlink(f"{inside}/{name}")  # noqa: PTH108
        with ignoring(OSError):
            os.rmdir(inside)  # noqa: PTH106


class Log:
    """An append-only file with a cap: ``engine.log``, then ``engine.log.1`` and so on."""

    def __init__(self, path: str, size: int, files: int) -> None:
        self.path, self.size, self.files = path, size, files
        self.open()

    def open(self) -> None:
        """Open the current file for appending."""
        # neither a link to elsewhere nor a pipe that nobody reads is a log
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.fd = os.open(self.path, flags, 0o600)
        self.used = os.fstat(self.fd).st_size

    def write(self, data: bytes) -> None:
        """Append, rotate when the file is full; a full disk costs log lines, never the engine."""
        with ignoring(OSError):
            os.write(self.fd, data)
        self.used += len(data)
        if self.used >= self.size:
            with ignoring(OSError):
                self.rotate()

    def rotate(self) -> None:
        """Shift every file by one number; the oldest falls off."""
        os.close(self.fd)
        try:
            for number in range(self.files - 1, 0, -1):
                older = f"{self.path}.{number}"
                newer = f"{self.path}.{number - 1}" if number > 1 else self.path
                with ignoring(FileNotFoundError):
                    os.replace(newer, older)  # noqa: PTH105
            if self.files == 1:
                os.truncate(self.path, 0)
        finally:
            self.open()


def exec_engine(order: dict[str, Any], output: int, failure: int, libc: ctypes.CDLL, parent: int) -> None:
    """Become the engine; runs in the forked child and never returns."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the guardian died in between
            os._exit(127)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(order["cwd"])
        os.execvpe(order["argv"][0], order["argv"], order["env"])  # noqa: S606 - an argv list, no shell
    except OSError as error:
        os.write(
            failure, marshal.dumps({"error": (error.strerror or str(error)).lower(), "errno": error.errno})
        )
    finally:
        os._exit(127)


class Guardian:
    """One engine from its start to the death of its last descendant."""

    def __init__(self, control: int, libc: ctypes.CDLL) -> None:
        self.control = control
        self.incoming = b""
        self.libc = libc
        self.killed: set[int] = set()
        self.leader = 0
        self.leader_alive = False
        self.childless = False  # as the kernel said when it was last asked
        self.deadline: float | None = None  # when the tree gets KILL
        self.helpers: set[int] = set()  # what was run to stop it, or to clean up
        self.cleaning = False
        self.reported = 0.0

    def say(self, **message: object) -> None:
        """Tell the orchestrator, if it is still there."""
        with ignoring(OSError):
            os.write(self.control, pack(message))

    def begin(self) -> bool:
        """Read the first order and start the engine; False when it could not be started."""
        messages: list[dict[str, Any]] = []
        while not messages:
            data = os.read(self.control, 1 << 16)
            if not data:
                return False
            messages, self.incoming = unpack(self.incoming + data)
        self.order, *self.early = messages  # a stop may have come together with it
        self.grace = min(float(self.order["grace"]), ORPHAN_GRACE)
        try:
            self.log = Log(self.order["log"], self.order["log_bytes"], self.order["log_files"])
            os.mkdir(self.order["temporary"], 0o700)  # noqa: PTH102
        except OSError as error:
            self.say(error=f"{error.filename} can't be written: {(error.strerror or str(error)).lower()}")
            return False
        self.output, write_end = os.pipe()
        with ignoring(OSError):
            import fcntl

            fcntl.fcntl(self.output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.output, False)
        failed, failure = os.pipe()
        me = os.getpid()
        self.leader = os.fork()
        if self.leader == 0:
            exec_engine(self.order, write_end, failure, self.libc, me)
        os.close(write_end)
        os.close(failure)
        problem = os.read(failed, 4096)
        os.close(failed)
        if problem:
            os.waitpid(self.leader, 0)
            remove(self.order["temporary"])
            self.say(**marshal.loads(problem))  # noqa: S302 - from our own fork
            return False
        self.leader_alive = True
        self.say(spawned=self.leader)
        return True

    def stop(self, grace: float) -> None:
        """TERM to the leader now (again on each call), KILL to the tree after `grace` seconds."""
        if self.cleaning:
            return  # nothing of the tree is left, and this is quick
        due = time.monotonic() + grace
        self.deadline = due if self.deadline is None else min(self.deadline, due)
        if not self.leader_alive:
            return
        if not self.order.get("stop_argv"):
            kill([self.leader], signal.SIGTERM)
        elif grace > 0 and not self.helpers:
            self.help(self.order["stop_argv"])

    def help(self, argv: list[str]) -> None:
        """Run another program; what it says goes to the log."""
        me, null = os.getpid(), os.open(os.devnull, os.O_WRONLY)
        pid = os.fork()
        if pid == 0:
            exec_engine({**self.order, "argv": argv}, self.log.fd, null, self.libc, me)
        os.close(null)
        self.helpers.add(pid)

    def hear(self) -> None:
        """Take orders; the socket's end is one too."""
        try:
            data = os.read(self.control, 1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.poll.unregister(self.control)
            self.stop(self.grace)
            return
        messages, self.incoming = unpack(self.incoming + data)
        self.obey(messages)

    def obey(self, messages: list[dict[str, Any]]) -> None:
        """Follow orders."""
        for message in messages:
            self.stop(float(message["stop"]))

    def pump(self) -> None:
        """Move what the engine printed into its log."""
        while True:
            try:
                data = os.read(self.output, READ_BYTES)
            except OSError:  # nothing more for now
                return
            if not data:
                with ignoring(KeyError):
                    self.poll.unregister(self.output)
                return
            self.log.write(data)
            if len(data) < READ_BYTES // 4:
                return

    def reap(self) -> None:
        """Collect the dead; the leader's end is told, and its leftovers get TERM."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            self.childless = False
            if pid == 0:
                return
            if pid == self.leader:
                self.leader_alive = False
                self.pump()
                code = os.waitstatus_to_exitcode(status)
                self.say(exited={"code": code if code >= 0 else None, "signal": -code if code < 0 else None})
                left = self.left()
                self.killed.update(left)
                kill(left, signal.SIGTERM)
                self.stop(LEFTOVER_GRACE)

    def left(self) -> list[int]:
        """Return what lives of the engine's tree."""
        return [pid for pid in descendants(os.getpid()) if pid not in self.helpers]

    def finish(self) -> bool:
        """Past the deadline, kill what is left; True when nothing is."""
        left = descendants(os.getpid())
        now = time.monotonic()
        if not left and not self.childless:
            return False  # forked while we looked; for a subreaper only the kernel's word is final
        if not left:
            if self.leader_alive or self.cleaning or not self.order.get("clean_argv"):
                return not self.leader_alive
            self.cleaning, self.deadline = True, now + CLEAN_GRACE
            self.help(self.order["clean_argv"])
            return False
        if self.deadline is not None and now >= self.deadline:
            if now < self.deadline + TRACKER_GRACE:
                left = [pid for pid in left if TRACKER not in read_proc(pid, "cmdline")]
            self.killed.update(pid for pid in left if pid not in self.helpers)
            kill(left, signal.SIGKILL)
            if now >= self.deadline + 1 and now >= self.reported + 1:
                self.reported = now
                self.say(survivors=left)
        return False

    def watch(self) -> None:
        """Run until nothing is left."""
        self.poll = select.poll()
        wake, wake_write = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.stop(self.grace))
        for fd in (self.control, self.output, wake):
            self.poll.register(fd, select.POLLIN)
        self.obey(self.early)
        while True:
            self.reap()
            ending = self.deadline is not None or not self.leader_alive
            if ending and self.finish():
                break
            # while the end is near the tree is looked at 20 times a second, else only events wake us
            for fd, _ in self.poll.poll(50 if ending else None):
                if fd == wake:
                    with ignoring(OSError):
                        os.read(wake, 4096)
                elif fd == self.output:
                    self.pump()
                else:
                    self.hear()
        self.pump()
        remove(self.order["temporary"])
        self.say(gone=sorted(self.killed))


def main() -> None:
    """Guard one engine; the only argument is the control socket's descriptor."""
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A fork of the orchestrator may hold the socket's other end open: its death has to be heard all the same.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guardian = Guardian(control, libc)
    if guardian.begin():
        os.set_blocking(control, False)
        guardian.watch()


if __name__ == "__main__":
    main()
