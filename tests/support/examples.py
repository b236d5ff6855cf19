"""How many examples a property is tried with: some in `make test`, all of them where slow tests run too."""

import os
from typing import Any

from hypothesis import settings

EVERY = "XTOKEN_EVERY_EXAMPLE"


def examples(some: int, every: int, parent: settings | None = None, **options: Any) -> settings:
    """`some` examples; `every` one where slow tests are not left out (see `tests/conftest.py`)."""
    count = every if os.environ.get(EVERY) else some
    return settings(parent, **{"deadline": None, **options, "max_examples": count})
