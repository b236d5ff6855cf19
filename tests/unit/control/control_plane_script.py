"""A control plane whose runs have scripted workers: its processes are real, its queue is, and its database.

    control_plane_script.py DIRECTORY STEPS [--start] [--do WORKER:WHEN:DEED]

With --start it begins a run; without it finds what an earlier one has left. It ends when no run goes on.
"""

import argparse
import time
from pathlib import Path

from tests.unit.supervisor.scripted_run import resolved_run, use_scripted_workers
from xtoken_services.common.processes.logs import set_up
from xtoken_services.control.runs import Runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--leave", action="store_true")
    parser.add_argument("--do", action="append", default=[])
    options = parser.parse_args()
    set_up()
    state = options.directory / "state"
    state.mkdir(exist_ok=True)
    deeds: dict[str, list[str]] = {}
    for told in options.do:
        worker, _, deed = told.partition(":")
        deeds.setdefault(worker, []).append(deed)

    use_scripted_workers(state, options.steps, **deeds)
    runs = Runs(options.directory / "runs")
    if options.start:
        runs.start(resolved_run(runs.directory / "one", options.steps).spec)
    while runs.active():
        if options.leave and (state / "steps").exists():
            runs.detach_all()
        time.sleep(0.05)
    runs.join()
    runs.close()


if __name__ == "__main__":
    main()
