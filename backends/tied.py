"""Run a program that ends with the process that wanted it: ``python -I tied.py PID PROGRAM [ARGUMENT...]``.

For short work that needs no guardian, as it starts no processes of its own. It stands alone, imports nothing
of ours, and has become the program once it is set up.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(owner: int, argv: list[str]) -> None:
    """Become the program; exits with 1 and the reason when it can't be run."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:  # it died before it could be noticed
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606  # a program and its arguments, no shell
    except OSError as error:
        sys.exit(f"{argv[0]}: {(error.strerror or str(error)).lower()}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
