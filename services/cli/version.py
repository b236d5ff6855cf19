"""`xtoken version`."""

from __future__ import annotations

import typer

from services.cli.options import JsonOption


def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    import json
    from importlib.metadata import version as version_of

    found = version_of("xtoken")
    typer.echo(json.dumps({"version": found}) if as_json else found)
