"""Set up before any test module is imported."""

import os
from pathlib import Path

# Triton reads this once, when it is first imported: without a GPU its kernels run in the interpreter.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
