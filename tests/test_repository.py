"""The repository itself: links lead somewhere, versions agree, the lock file covers what is declared."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].values()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def label(path: Path) -> str:
    """Name a test after its file."""
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """Return Markdown without its code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))


def links(text: str) -> list[str]:
    """Return the targets of all links in a page, those to other sites left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, text: str) -> list[str]:
    """Return the links of a page that lead nowhere."""
    wrong = []
    for target in links(text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        inside = path.is_relative_to(ROOT)
        if not inside or not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            wrong.append(target)
    return wrong


def committed() -> list[Path]:
    """Return the files that belong to the repository."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def normal(requirement: str) -> str:
    """Return the normalised name of the package that a requirement asks for."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]).lower()


def locked() -> dict[str, str]:
    """Return the lock file's entries by name."""
    text = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^([\w.-]+)==(.+?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return {normal(name): entry for name, entry in entries}


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_link_leads_somewhere_good(page: Path) -> None:
    assert not broken(page, page.read_text())


def test_every_page_can_be_reached_from_the_index_good() -> None:
    index = ROOT / "docs" / "index.md"
    reached = {(index.parent / target.partition("#")[0]).resolve() for target in links(index.read_text())}
    missing = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - reached - {index}
    assert not {label(page) for page in missing}, "docs/index.md does not link to them"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_a_page_with_commands_says_how_they_are_found_good(page: Path) -> None:
    text = page.read_text()
    shells = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    bare = [line for shell in shells for line in shell.splitlines() if re.match(r"(\$ )?orchestrator ", line)]
    if "reference" not in page.parts:  # read by those who have used it
        assert not bare or "source .venv/bin/activate" in text
    assert not re.findall(r"(?:^|[$`( ])python benchmarks/", text, re.MULTILINE)


def test_broken_links_are_found_bad() -> None:
    page = ROOT / "docs" / "index.md"
    text = (
        "[a](nowhere.md) [b](../README.md#no-such-part) [c](../../outside) `[d](code)` "
        "[e](https://example.org) [f](../README.md)"
    )
    assert broken(page, text) == ["nowhere.md", "../README.md#no-such-part", "../../outside"]


def test_the_changelog_keeps_its_format_good() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.+)$", text, re.MULTILINE)
    for release in releases:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - (unreleased|\d{4}-\d\d-\d\d)", release), release
    versions = [re.findall(r"\d+", release)[:3] for release in releases]
    assert versions == sorted(versions, key=lambda version: [int(part) for part in version], reverse=True)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds
    assert releases[0].startswith(f"[{PROJECT['version']}]")


def test_the_installed_version_is_the_declared_one_good() -> None:
    assert importlib.metadata.version("inference-orchestrator") == PROJECT["version"]


def test_the_lock_file_covers_every_declared_package_with_hashes_good() -> None:
    entries = locked()
    declared = [
        *PROJECT["dependencies"],
        *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
    ]
    assert not {normal(each) for each in declared} - entries.keys(), "run make lock"
    assert not [name for name, entry in entries.items() if "--hash=sha256:" not in entry]


def test_declared_pins_and_bounds_hold_in_the_lock_file_good() -> None:
    entries = locked()
    for requirement in map(Requirement, chain(PROJECT["dependencies"], *EXTRAS)):
        version = entries[normal(requirement.name)].split()[0]
        assert version in requirement.specifier, f"{requirement} is locked at {version}; run make lock"


def test_no_path_of_a_single_machine_is_committed_good() -> None:
    private = re.compile(r"(?<![\w./$~:-])/(?:work|farm|root)/[\w.]|/tmp/(?:bash_jobs|models)")
    found = []
    for path in committed():
        if path.is_relative_to(ROOT / "tests" / "data"):
            continue  # captured as they were
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{label(path)}: {match.group()}" for match in private.finditer(text)]
    assert not found


def test_the_licence_is_whole_good() -> None:
    text = (ROOT / "LICENSE").read_text()
    articles = [int(number) for number in re.findall(r"^(\d+)\. \w", text, re.MULTILINE)]
    assert articles == list(range(1, 16))
    assert text.rstrip().endswith("new EUPL version.")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/how-to/develop.md"])
def test_every_make_command_in_a_page_exists_good(page: str) -> None:
    named = re.findall(r"(?:`|^)make (?:[A-Z]+=\S+ )?([a-z]+)", (ROOT / page).read_text(), re.MULTILINE)
    assert named
    assert set(named) <= TARGETS


def test_every_make_target_is_documented_good() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "README.md").read_text()
    assert not {target for target in TARGETS - {"help"} if f"make {target}" not in told}


def test_make_runs_only_benchmarks_that_exist_good() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    named = re.search(r"^BENCHMARKS := (.+)$", text, re.MULTILINE)
    assert named
    assert all((ROOT / name).is_file() for name in named.group(1).split())


def test_pre_commit_hooks_run_only_what_the_lock_file_brings_good() -> None:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for repository in settings["repos"]:
        assert repository["repo"] == "local"
        assert all(hook["entry"].startswith(".venv/bin/") for hook in repository["hooks"])


def test_an_old_python_is_told_so_in_one_line_bad() -> None:
    script = (
        "import sys, runpy; sys.version_info = (3, 9, 1); sys.version = '3.9.1 (x)'; "
        f"runpy.run_path({str(ROOT / 'tools' / 'install.py')!r}, run_name='__main__')"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.returncode == 1
    assert told.stderr.startswith("install: Python 3.11 or newer is needed, ")
    assert told.stderr.count("\n") == 1
    assert told.stdout == ""
