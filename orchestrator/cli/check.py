"""``orchestrator check``: every fault of profiles, where it is."""

from __future__ import annotations

from orchestrator.cli import options


def check(
    profiles: options.ProfileFiles,
    backend: options.Backend = None,
    sets: options.Set = None,
    as_json: options.Json = False,
) -> int:
    """Check profiles without starting anything: every fault as `file:line:column: key: what is wrong`."""
    from orchestrator.cli import console, documents, faults, loading
    from orchestrator.errors import ProfileError

    code = 0
    results = []
    for path in profiles:
        name, problems = None, []
        try:
            name = loading.load_all([path], sets, backend)[0].name
        except ProfileError as error:
            code = error.exit_code
            problems = [documents.Problem(**faults.problem(fault)) for fault in error.problems]
            if not as_json:
                console.err(faults.render(faults.describe(error)))
        else:
            if not as_json:
                console.out(f"ok {path}")
        results.append(documents.Checked(path=path, ok=name is not None, name=name, problems=problems))
    if as_json:
        console.document(documents.Check(ok=code == 0, profiles=results))
    return code
