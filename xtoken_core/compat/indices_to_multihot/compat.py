"""Compatibility surface of `indices_to_multihot`: a public name that the operator itself does not use."""

from functools import partial
from typing import Any


def null_decorator(*args: Any, **kwargs: Any) -> Any:
    """Return the decorated function unchanged; usable bare or with any arguments."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return partial(lambda function: function)
