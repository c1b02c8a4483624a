"""The parser without the rest of its package, which is there all the same for whoever asks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def ran(script: str, **environ: str) -> str:
    """Run a program in an interpreter of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "use",
    [
        "import aiohttp; print(aiohttp.ClientSession.__name__)",
        "from aiohttp import ClientSession; print(ClientSession.__name__)",
        "from aiohttp import web; import aiohttp; print(aiohttp.ClientSession.__name__)",
        "import aiohttp.client; print(aiohttp.ClientSession.__name__)",
        "import aiohttp; aiohttp.streams, aiohttp.__version__; print(aiohttp.ClientSession.__name__)",
        "import httpx_aiohttp, aiohttp; print(aiohttp.ClientSession.__name__)",
    ],
)
def test_whoever_wants_more_of_aiohttp_has_it_good(use: str) -> None:
    script = f"import sys, orchestrator.gateway; assert 'aiohttp.client' not in sys.modules; {use}"
    assert ran(script) == "ClientSession"
    assert ran(f"import aiohttp, orchestrator.gateway; {use}") == "ClientSession", "imported before"


def test_parsers_are_the_ones_in_c_good() -> None:
    from orchestrator.gateway import llhttp

    for parser in (llhttp.HttpRequestParser, llhttp.HttpResponseParser):
        assert parser.__module__ == "aiohttp._http_parser", "the one in Python is slow and less strict"


PACKAGE = """
print("ran", __name__)
from .one import VALUE
from . import two
OTHER = two.VALUE + VALUE
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "deferred"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "one.py").write_text("VALUE = 1\n")
    (folder / "two.py").write_text("from . import one\nVALUE = one.VALUE + 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("use", "printed"),
    [
        ("import deferred.two; print(deferred.two.VALUE)", "ran deferred\n2"),
        ("from deferred.two import VALUE; print(VALUE)", "ran deferred\n2"),
        ("from deferred import two; print(two.VALUE)", "ran deferred\n2"),
        ("import deferred; print(deferred.OTHER); print(deferred.OTHER)", "ran deferred\n3\n3"),
        ("import deferred.one; from deferred import OTHER; print(OTHER)", "ran deferred\n3"),
        ("import deferred; print(hasattr(deferred, '__wrapped__'))", "False"),
        ("import deferred; print(hasattr(deferred, 'nothing'))", "ran deferred\nFalse"),
        ("from deferred.one import VALUE; print(VALUE)", "1"),
    ],
)
def test_a_package_runs_once_and_when_it_is_asked_for_a_name_good(
    package: Path, use: str, printed: str
) -> None:
    script = f"""
from orchestrator.gateway.llhttp import alone
with alone("deferred"):
    from deferred.one import VALUE
print("alone", VALUE)
{use}
"""
    assert ran(script, PYTHONPATH=str(package)) == f"alone 1\n{printed}"


def test_threads_that_ask_at_once_all_get_it_whole_ugly(package: Path) -> None:
    script = """
import threading
from orchestrator.gateway.llhttp import alone
with alone("deferred"):
    import deferred.one
found, barrier = [], threading.Barrier(16)
def ask():
    import deferred
    barrier.wait()
    found.append(deferred.OTHER)
threads = [threading.Thread(target=ask) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found == [3] * 16)
"""
    assert ran(script, PYTHONPATH=str(package)) == "ran deferred\nTrue"


def test_what_can_not_be_imported_is_as_it_was_bad(package: Path) -> None:
    (package / "deferred" / "one.py").write_text("import no_such")
    script = """
from orchestrator.gateway.llhttp import alone
for _ in range(2):
    for name in ("no_such", "deferred"):
        try:
            with alone(name):
                __import__(f"{name}.one")
        except ImportError as error:
            print(error)
"""
    assert ran(script, PYTHONPATH=str(package)).splitlines() == ["No module named 'no_such'"] * 4
