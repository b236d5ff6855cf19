"""Coverage-guided fuzzing of a parser: `python -m tests.fuzz TARGET --seconds 1200 --out RESULT.json`.

The seconds are processor time. What is executed is added to the result file, so that its totals grow over many runs;
the smallest inputs that reach new code are kept in `tests/fuzz/corpus`. An input that breaks the target is left in
`build/fuzz/TARGET`, the exit status is 1, and the result file counts it.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.fuzz import corpus
from tests.fuzz.seeds import SEEDS

ROOT = Path(__file__).parents[2]
OPTIONS = ("-max_len=4096", "-timeout=60", "-rss_limit_mb=2048", "-verbosity=1", "-print_final_stats=0")
COVERED = re.compile(r"cov: (\d+) ft: (\d+)")


def fuzz(target: str, seconds: float) -> dict[str, Any]:
    """Fuzz a target for so much processor time and keep the inputs that reach new code."""
    work = ROOT / "build" / "fuzz" / target
    inputs = work / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    for one in [*SEEDS[target](), *corpus.load(target)]:
        (inputs / hashlib.sha1(one).hexdigest()).write_bytes(one)
    report = work / "report.json"
    report.unlink(missing_ok=True)
    crashes = set(work.glob("*-*"))
    log = child(target, seconds, report, [f"-artifact_prefix={work}/", *OPTIONS, str(inputs)])
    broken = sorted(path.name for path in set(work.glob("*-*")) - crashes)
    done = json.loads(report.read_text()) if report.exists() else {"executions": 0, "cpu_s": 0.0}
    covered = COVERED.findall(log)
    if not broken and not covered:
        raise SystemExit(f"fuzzing {target} failed:\n{log[-3000:]}")
    kept = corpus.save(target, (path.read_bytes() for path in inputs.iterdir()))
    if broken:
        print(log[-4000:])
    return done | {
        "kept_inputs": kept, "edges": int(covered[-1][0]) if covered else 0,
        "features": int(covered[-1][1]) if covered else 0, "broken_inputs": broken,
    }  # fmt: skip


def child(target: str, seconds: float, report: Path, options: list[str]) -> str:
    """Run the fuzzer's process and return its log."""
    command = [sys.executable, "-m", "tests.fuzz.coverage", target, str(seconds), str(report), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False).stderr


def add_to(path: Path, target: str, found: dict[str, Any]) -> None:
    """Add the counts of one run to a result file."""
    result = json.loads(path.read_text()) if path.exists() else {"targets": {}}
    result["machine"] = {"cpus": os.cpu_count(), "processor": platform.machine()}
    result["versions"] = {"python": platform.python_version(), "atheris": version("atheris")}
    row = result["targets"].setdefault(target, {"runs": 0, "cpu_s": 0.0, "executions": 0, "failures": 0})
    row["runs"] += 1
    row["cpu_s"] = round(row["cpu_s"] + found["cpu_s"], 1)
    row["executions"] += found["executions"]
    row["failures"] += len(found["broken_inputs"])
    row |= {key: found[key] for key in ("kept_inputs", "edges", "features")}
    row["last"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    """Fuzz the targets one after the other; 0 if none was broken."""
    parser = argparse.ArgumentParser(description="Fuzz parsers with coverage guidance (needs the extra fuzz).")
    parser.add_argument("target", nargs="+", choices=[*SEEDS, "all"])
    parser.add_argument("--seconds", type=float, default=1200.0, help="processor time per target")
    parser.add_argument("--jobs", type=int, default=1, help="targets side by side")
    parser.add_argument("--out", type=Path, help="add the counts to this result file")
    options = parser.parse_args()
    try:
        version("atheris")
    except PackageNotFoundError:
        parser.error("atheris is not installed: pip install -e '.[fuzz]'")
    targets = list(SEEDS) if "all" in options.target else options.target
    failed = False
    with ThreadPoolExecutor(options.jobs) as threads:
        for target, found in zip(targets, threads.map(lambda t: fuzz(t, options.seconds), targets), strict=True):
            print(json.dumps({"target": target, **found}), flush=True)
            failed |= bool(found["broken_inputs"])
            if options.out is not None:
                add_to(options.out, target, found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
