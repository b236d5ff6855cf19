"""A table of cases for a test."""

from typing import Any

import pytest


def cases(names: str, *rows: Any, ids: Any = None) -> pytest.MarkDecorator:
    """Run a test once for each row, whose values are its arguments of these names."""
    return pytest.mark.parametrize(names, rows, ids=ids)
