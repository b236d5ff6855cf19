"""The `xtoken` command: one module per command."""

from xtoken_services.cli.app import main

__all__ = ["main"]
