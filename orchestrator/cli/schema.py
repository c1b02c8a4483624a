"""``orchestrator schema``: the JSON Schema of a profile, for editors."""


def schema() -> None:
    """Print the JSON Schema of a profile."""
    from orchestrator.cli import console
    from orchestrator.profile import json_schema

    console.document(json_schema())
