"""Set up before any test module is imported."""

import os
from pathlib import Path

# Several pytest workers share the cores: threads of torch that spin beside each other cost more than they give. Torch
# reads this when it is first imported, and so do the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton reads this once, when it is first imported: without a GPU its kernels run in the interpreter.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
