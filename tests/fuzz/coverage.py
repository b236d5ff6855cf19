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

with atheris.instrument_imports(include=["xtoken_core", "xtoken_services", "tomllib", "tests.fuzz.targets"]):
    from tests.fuzz.targets import HOME, TARGETS

CHECK_EVERY = 64
REPORT_S = 5.0


def main() -> None:
    """Fuzz until the processor time is used up, then write a report and end."""
    target, seconds, report = TARGETS[sys.argv[1]], float(sys.argv[2]), Path(sys.argv[3])
    executions, next_report = 0, 0.0

    def run(data: bytes) -> None:
        nonlocal executions, next_report
        target(data)
        executions += 1
        if executions % CHECK_EVERY:
            return
        used = time.process_time()
        if used >= min(next_report, seconds):
            next_report = used + REPORT_S
            unfinished = report.with_suffix(".tmp")
            unfinished.write_text(json.dumps({"executions": executions, "cpu_s": used}))
            unfinished.replace(report)
        if used >= seconds:
            HOME.cleanup()
            os._exit(0)  # libFuzzer has no way to end by processor time; its corpus is on disk already

    atheris.Setup([sys.argv[0], *sys.argv[4:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
