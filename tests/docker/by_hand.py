"""What the Compose file starts on a GPU node, run on a machine that has a GPU and no container engine.

    python -m tests.docker.by_hand [--out FILE] [--cpu]

The service is started with its command line, environment and limits, its folders being other ones here. A run over tiny
models is started by REST, stopped, resumed and completed; its page and metrics are read; the service is stopped as an
engine stops it. Takes two minutes. An engine's part (user, capabilities, mounts, shared memory) is not imitated.
"""

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.docker.compose_service import ROOT, ComposeService, read_image, read_service, read_settings
from tests.support.tiny_run import TinyAssets, documents, make_assets, tiny_spec, write_jsonl

RESULT = ROOT / "benchmarks" / "results" / "gpu_service.json"
OVER = ("completed", "failed", "stopped", "interrupted")
WAITED_S = 90.0


class ByHand:
    """Checks of a started service, and their outcomes.

    Attributes:
        checks: Every check so far: name, outcome, detail, seconds since the start.
    """

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def check(self, name: str, passed: bool, **detail: Any) -> None:
        """Record a check.

        Raises:
            AssertionError: It has failed.
        """
        seconds = round(time.monotonic() - self._began, 1)
        self.checks.append({"check": name, "passed": bool(passed), "at_s": seconds, **detail})
        print(f"{seconds:6.1f} s  {'passed' if passed else 'FAILED'}  {name}  {detail or ''}", flush=True)
        assert passed, name

    def wait(
        self, name: str, look: Callable[[], Any], process: subprocess.Popen[bytes], seconds: float = WAITED_S
    ) -> Any:
        """Look until there is something, and record that there is."""
        deadline = time.monotonic() + seconds
        found = None
        while not found and time.monotonic() < deadline and process.poll() is None:
            found = look()
            time.sleep(0 if found else 0.1)
        self.check(name, bool(found))
        return found


def run_body(service: ComposeService, data: Path, device: str, records: int) -> dict[str, Any]:
    """Return the body of the request that starts the run, with paths as the service sees them."""
    inside = Path(service.inside("/data"))
    assets = TinyAssets(
        *(inside / name for name in ("student", "teacher", "other-teacher")),
        *(inside / f"to-{name}.safetensors" for name in ("teacher", "other")),
    )
    write_jsonl(data / "train.jsonl", documents(records, seed=2))
    spec = tiny_spec(
        assets, data.parent / "unused", name="by-hand", data={"path": inside / "train.jsonl"}, output=Path("by-hand"),
        workers={"device": device}, train={"checkpoint_every": 20, "learning_rate": 1e-4},
    )  # fmt: skip
    return dict(spec.model_dump(mode="json"))


def run_by_rest(by_hand: ByHand, http: httpx.Client, process: subprocess.Popen[bytes], body: dict[str, Any]) -> None:
    """Start, stop, resume and complete a run by REST, and read its page and its metrics."""
    answer = http.post("/v1/runs", json=body)
    by_hand.check("a run is started", answer.status_code == 201, status=answer.status_code)
    run = f"/v1/runs/{answer.json()['id']}"

    def reached(step: int) -> bool:
        """Return whether the run has made steps; a run that is over instead is the next check's failure."""
        state = http.get(run).json()
        return (state["step"] or 0) >= step or state["state"] in OVER

    by_hand.wait("ten steps", lambda: reached(10), process)
    page = http.get(run.removeprefix("/v1")).text
    by_hand.check("its page is read", "by-hand" in page and "running" in page.lower(), characters=len(page))
    metrics = http.get("/metrics").text
    by_hand.check("its metrics are read", "xtoken_" in metrics, lines=len(metrics.splitlines()))
    by_hand.check("stop is accepted", http.post(f"{run}/stop").status_code == 202)
    by_hand.wait("it stops", lambda: http.get(run).json()["state"] in OVER, process)
    stopped = http.get(run).json()
    part = {name: stopped[name] for name in ("state", "step", "steps", "checkpoint", "exit_code")}
    whole = stopped["step"] == stopped["checkpoint"] and 10 <= stopped["step"] < stopped["steps"]
    by_hand.check("it has stopped gracefully at a checkpoint", stopped["state"] == "stopped" and whole, **part)
    by_hand.check("resume is accepted", http.post(f"{run}/resume").status_code == 202)
    by_hand.wait("one more step", lambda: reached(stopped["step"] + 1), process)
    by_hand.wait("it ends", lambda: http.get(run).json()["state"] in OVER, process)
    ended = http.get(run).json()
    part = {name: ended[name] for name in ("state", "step", "steps", "launch", "summary")}
    by_hand.check("it is complete", ended["state"] == "completed" and ended["step"] == ended["steps"], **part)
    steps = http.get(f"{run}/metrics", params={"points": 10000}).json()["steps"]
    numbers = [line["step"] for line in steps]
    last = {
        name: value for name, value in steps[-1].items() if name in ("loss", "memory_peak_bytes", "tokens_per_second")
    }
    by_hand.check("every step once", numbers == sorted(set(numbers)) and len(numbers) == ended["steps"], last=last)
    teacher = http.get(f"{run}/logs", params={"worker": "teacher-0-0"}).text
    loaded, ring = (re.search(pattern, teacher) for pattern in (r"loaded from \S+ on (\S+)", r"slots in (\w+)"))
    on = {"device": loaded and loaded[1], "signal": ring and ring[1]}
    by_hand.check("on the device", str(on["device"]).startswith(body["workers"]["device"]), **on)
    model = http.get(f"{run}/artifacts/model/model.safetensors")
    by_hand.check("its model is downloaded", model.status_code == 200, bytes=len(model.content))


def stop(by_hand: ByHand, service: ComposeService, process: subprocess.Popen[bytes]) -> None:
    """Stop the service as an engine does."""
    grace = float(service.service["stop_grace_period"].removesuffix("s"))
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(grace)
    seconds = round(time.monotonic() - began, 1)
    by_hand.check("the service stops within its grace period", code == 0, exit_code=code, seconds=seconds)


def by_hand_in(folder: Path, by_hand: ByHand, device: str, report: dict[str, Any]) -> None:
    """Make the service's folders below one, start it and check it; adds machine and service to the report."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = read_settings(ROOT / ".env") | {"XTOKEN_PORT": str(port)}
    folders = {f"/{name}": folder / name for name in ("data", "runs", "cache")}
    for inner in folders.values():
        inner.mkdir()
    make_assets(folders["/data"])
    image = read_image(ROOT / "deploy" / "Dockerfile", "gpu")
    service = ComposeService(read_service("xtoken", ROOT / "docker-compose.yml", settings), image, folders)
    body = run_body(service, folders["/data"], device, 4800 if device == "cuda" else 640)
    report |= {
        "device": torch_device(device),
        "command": service.command()[2:],
        "environment": sorted(service.environment()),
    }
    print(json.dumps(report, indent=2), flush=True)
    log = folder / "service.log"
    process = service.start(log)
    try:
        by_hand.wait("the health check succeeds", service.healthy, process)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            run_by_rest(by_hand, http, process, body)
        stop(by_hand, service, process)
    except BaseException:
        print(log.read_text(encoding="utf-8")[-3000:], flush=True)
        raise
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a service that still runs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def torch_device(device: str) -> dict[str, Any]:
    """Return the GPU and the versions that the result names."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    # Asked of the driver: this process must not hold memory of the GPU itself.
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() if device == "cuda" else None
    return {"gpu": gpu, "python": platform.python_version(), "kernel": platform.release(), **versions}


def main() -> int:
    """Run all checks and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cpu", action="store_true", help="the same without a GPU")
    arguments = parser.parse_args()
    by_hand = ByHand()
    report: dict[str, Any] = {}
    error = None
    with tempfile.TemporaryDirectory(prefix="xtoken-service-") as folder:
        try:
            by_hand_in(Path(folder), by_hand, "cpu" if arguments.cpu else "cuda", report)
        except Exception as failure:
            traceback.print_exc()
            error = repr(failure)
    result = report | {"passed": error is None, "error": error, "checks": by_hand.checks}
    arguments.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(bool(error))


if __name__ == "__main__":
    raise SystemExit(main())
