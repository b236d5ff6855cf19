"""Process that fuzzes one target with atheris; `python -m tests.fuzz` starts it.

python -m tests.fuzz.coverage TARGET SECONDS REPORT [libFuzzer options] CORPUS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["xtoken_core", "services", "tomllib", "tests.fuzz.targets"]):
    from tests.fuzz.targets import TARGETS

CHECK_EVERY = 256


def main() -> None:
    """Fuzz until the processor time is used up, then write a report and end."""
    target, seconds, report = TARGETS[sys.argv[1]], float(sys.argv[2]), Path(sys.argv[3])
    executions = 0

    def run(data: bytes) -> None:
        nonlocal executions
        target(data)
        executions += 1
        if executions % CHECK_EVERY == 0 and time.process_time() >= seconds > 0:
            report.write_text(json.dumps({"executions": executions, "cpu_s": time.process_time()}))
            os._exit(0)  # libFuzzer has no way to end by processor time; its corpus is on disk already

    atheris.Setup([sys.argv[0], *sys.argv[4:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
