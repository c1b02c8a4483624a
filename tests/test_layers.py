"""Who may import whom, read from the sources.

    cli -> gateway, bench -> model -> wire -> sse -> ground -> errors
    backends -> ground, errors

Every module of `orchestrator` has its place in `LAYERS`; a new one fails here until it is given one.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up: a module may import its own row and the rows above its own in this list.
LAYERS: dict[str, tuple[str, ...]] = {
    "errors": ("errors",),
    "ground": (
        "backend", "container_client", "discovery", "engines", "fetching", "gguf_*", "hf_*", "hardware",
        "home", "inventory", "inventory_*", "leftovers", "log", "model_files", "model_hub", "model_hub_*",
        "model_package", "profile", "profile_*", "subscribers", "templates", "waiting", "yaml_*",
    ),
    "sse": ("sse",),
    "wire": ("wire", "chunks", "request", "tokens"),
    "model": (
        "model", "classify", "clients", "generation", "opening", "source", "switching", "switching_*",
        "transport",
    ),
    "gateway": ("gateway",),
    "bench": ("bench", "bench_*"),
    "doctor": ("doctor",),
    "cli": ("cli", "__main__"),
}  # fmt: skip
ORDER = list(LAYERS)
PEERS = {"gateway", "bench", "doctor"}  # side by side: none may import another
FOR_BACKENDS = {"errors", "ground"}

# Each takes 30 to 300 ms to import; `orchestrator --help` has 250 ms in all.
HEAVY = ("pydantic", "aiohttp", "httpx", "numpy", "gguf", "yaml", "rich", "psutil", "huggingface_hub")

LONGEST = 400  # lines


def modules(package: str) -> list[Path]:
    """Return a package's source files."""
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> set[str]:
    """Return the full names of everything that a module imports, at any depth, for types only too."""
    found: set[str] = set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            found.update(f"{source}.{alias.name}" for alias in node.names)
    return found


def layer(module: str) -> str:
    """Return the layer that a module of `orchestrator` was given."""
    for name, patterns in LAYERS.items():
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns):
            return name
    raise AssertionError(f"orchestrator/{module}: give it a place in LAYERS, tests/test_layers.py")


def layer_of(name: str) -> str | None:
    """Return the layer of an imported name, None when it is not ours."""
    package, _, rest = name.partition(".")
    if package != "orchestrator":
        return None
    module = rest.partition(".")[0]
    if module and importlib.util.find_spec(f"orchestrator.{module}"):
        return layer(module)
    return "model"  # the package itself or a public name of it, such as TextModel


def allowed(importer: str, imported: str) -> bool:
    """Tell whether a layer may import another."""
    if importer == imported:
        return True
    if {importer, imported} <= PEERS:
        return False
    return ORDER.index(imported) < ORDER.index(importer)


def label(path: Path) -> str:
    """Name a test after its module."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules("orchestrator"), ids=label)
def test_orchestrator_imports_only_downwards_good(path: Path) -> None:
    own = path.relative_to(ROOT / "orchestrator").parts[0].removesuffix(".py")
    if own == "__init__":
        return  # the public names come from everywhere
    wrong = [name for name in imports(path) if (to := layer_of(name)) and not allowed(layer(own), to)]
    assert not wrong, f"{label(path)} ({layer(own)}) may not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("path", modules("orchestrator"), ids=label)
def test_nothing_in_orchestrator_names_the_engines_good(path: Path) -> None:
    assert not [name for name in imports(path) if name.split(".")[0] == "backends"]
    strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert not [text for text in strings if isinstance(text, str) and text.startswith("backends.")]


@pytest.mark.parametrize("path", modules("backends"), ids=label)
def test_backends_import_only_the_ground_good(path: Path) -> None:
    wrong = [name for name in imports(path) if (to := layer_of(name)) and to not in FOR_BACKENDS]
    assert not wrong, f"{label(path)} may not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("path", modules("orchestrator") + modules("backends"), ids=label)
def test_a_module_says_what_it_owns_and_fits_on_a_few_pages_good(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), f"{label(path)} has no docstring"
    assert text.count("\n") <= LONGEST, f"{label(path)} is over {LONGEST} lines: where is the seam?"


@pytest.mark.parametrize(
    "path",
    [path for path in modules("orchestrator") + modules("backends") if "cli" not in path.parts],
    ids=label,
)
def test_only_the_command_line_prints_good(path: Path) -> None:
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "print" not in called, label(path)


@pytest.mark.parametrize("module", ["orchestrator", "orchestrator.cli", "orchestrator.cli.app"])
def test_importing_is_light_good(module: str) -> None:
    script = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(json.loads(loaded.stdout))


def test_the_gateway_brings_only_what_it_uses_good() -> None:
    script = "import sys, json, orchestrator.gateway; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    unused = (
        "aiohttp.client",
        "aiohttp.web",
        "structlog",
        "rich",
        "pydantic",
        "httpx",
        "psutil",
        "yaml",
        "gguf",
    )
    assert not set(unused) & set(json.loads(loaded.stdout))


def test_the_rules_forbid_what_they_should_bad() -> None:
    assert not allowed("wire", "model")
    assert not allowed("errors", "ground")
    assert not allowed("gateway", "bench")
    assert not allowed("model", "cli")
    assert allowed("cli", "gateway")
    assert allowed("model", "sse")
    assert layer_of("orchestrator.gateway.wire.Head") == "gateway"
    assert layer_of("orchestrator.TextModel") == "model"
    assert layer_of("httpx.Client") is None


def test_imports_are_found_wherever_they_hide_ugly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "orchestrator" / "gateway" / "x.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "from orchestrator import model as m\nfrom . import wire\nfrom ..cli import up\n"
        "def f():\n    import backends.base\n"
    )
    assert imports(module) == {
        "orchestrator.model",
        "orchestrator.gateway.wire",
        "orchestrator.cli.up",
        "backends.base",
    }
