"""The `xtoken` command: one module per command."""

from services.cli.app import main

__all__ = ["main"]
