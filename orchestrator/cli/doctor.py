"""``orchestrator doctor``: what this machine has, what is wrong with it, and what to do."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from orchestrator.cli import options

if TYPE_CHECKING:
    from orchestrator.doctor import Engine


def doctor(as_json: options.Json = False) -> int:
    """Look at GPUs, drivers, permissions and engines, and say what to do about each."""
    from orchestrator.cli import console, documents, services
    from orchestrator.doctor import examine, exit_code
    from orchestrator.home import home
    from orchestrator.model_files import default_cache

    ours = {service.port: ", ".join(service.names) for service in services.running()}
    found = examine(
        binaries=_engines(),
        folders={"state": home(), "model cache": default_cache()},
        ports={options.PORT: ours.get(options.PORT)},
    )
    if as_json:
        findings = [
            documents.Finding(
                level=finding.level, subject=finding.subject, message=finding.message, command=finding.command
            )
            for finding in found
        ]
        console.document(documents.Doctor(ok=exit_code(found) == 0, findings=findings))
    else:
        for finding in found:
            console.out(f"{finding.level:8} {finding.subject}: {finding.message}")
            if finding.command:
                console.out(f"{'':8} -> {finding.command}")
    return exit_code(found)


def _engines() -> list[Engine]:
    """Look for the program of every installed backend that runs one."""
    from dataclasses import replace

    from orchestrator.cli import console
    from orchestrator.discovery import find, installed
    from orchestrator.doctor import Engine, look_at
    from orchestrator.errors import BackendError

    engines: list[Engine] = []
    absent: list[Engine] = []
    for name in installed():
        if sys.stderr.isatty():  # each may take its time
            console.err(f"looking at {name}")
        try:
            backend = find(name)
            binary = backend.locate(os.environ)
            if backend.lists_devices:
                # the last one is the general name; an engine of its own kind may have no such program
                variables = getattr(getattr(backend, "program", None), "variables", ())
                engines.append(replace(look_at(name, binary), variable=next(reversed(variables), None)))
            else:
                version, kinds = backend.version_of(binary, os.environ), backend.drives(binary, os.environ)
                engines.append(Engine(name, binary.argv[0], binary.source, version=version, kinds=kinds))
        except BackendError as error:
            nowhere = ": not found; looked in " in error.message
            (absent if nowhere else engines).append(Engine(name, problem=error.message, advice=error.advice))
    return engines or absent  # nobody needs every engine
