"""`xtoken version`: the installed version."""

from __future__ import annotations

import typer

from xtoken_services.cli.options import JsonOption


def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    import json
    from importlib import metadata

    installed = metadata.version("xtoken")
    typer.echo(json.dumps({"version": installed}) if as_json else installed)
