"""What the Compose file starts on a GPU node, run on a machine that has a GPU and no container engine.

    python -m tests.docker.by_hand [--out FILE] [--cpu]

The service is started as Compose would start it: its command line, user, environment, limits, mounts and size of shared
memory (`tests.docker.compose_service` says how, and the result what cannot be imitated). A run over tiny models is
started by REST, stopped, resumed and completed; its pages and metrics are read; the service is stopped as an engine
stops it. Then it is started with `deploy/compose.remote.yml`, with a token. Takes two minutes.
"""

from __future__ import annotations

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

from tests.docker.compose_service import (
    ROOT,
    ComposeService,
    Imitation,
    bytes_of,
    copy_program,
    open_to_all,
    read_image,
    read_service,
    read_settings,
)
from tests.support.tiny_run import TinyAssets, documents, make_assets, tiny_spec, write_jsonl

RESULT = ROOT / "benchmarks" / "results" / "gpu_service.json"
FILES = (ROOT / "docker-compose.yml", ROOT / "deploy" / "compose.remote.yml")
TOKEN = "a-token-for-the-service-by-hand"
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


def status_of(process: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return {name: " ".join(value.split()) for name, _, value in (line.partition(":") for line in lines)}


def check_process(by_hand: ByHand, service: ComposeService, process: int) -> None:
    """Compare a started process with the service: user, capabilities, limits, shared memory, read-only data."""
    status = status_of(process)
    wanted = service.service
    if service.imitation.user:
        uid, gid = wanted["user"].split(":")
        by_hand.check("user", {status["Uid"], status["Gid"]} == {" ".join([uid] * 4), " ".join([gid] * 4)}, uid=uid)
        sets = {name: status[name] for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs")}
        dropped = [int(value, 16) for name, value in sets.items() if name != "NoNewPrivs"]
        by_hand.check("capabilities", not any(dropped) and sets["NoNewPrivs"] == "1", **sets)
    limits = Path(f"/proc/{process}/limits").read_text(encoding="utf-8").splitlines()
    files = next(line.split()[3:5] for line in limits if line.startswith("Max open files"))
    by_hand.check("limits", True, open_files=files, set_by_compose=wanted.get("ulimits", {}))
    if service.imitation.mounts:
        root = Path(f"/proc/{process}/root")
        shared = os.statvfs(root / "dev/shm")
        size = shared.f_blocks * shared.f_frsize
        by_hand.check("size of shared memory", size == bytes_of(wanted["shm_size"]), bytes=size)
        by_hand.check("read-only data", bool(os.statvfs(root / "data").f_flag & os.ST_RDONLY))


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


def run_by_rest(by_hand: ByHand, http: httpx.Client, process: subprocess.Popen[bytes], body: dict[str, Any]) -> str:
    """Start, stop, resume and complete a run by REST, and read its page and its metrics; returns its id."""
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
    return str(answer.json()["id"])


def check_token(by_hand: ByHand, http: httpx.Client, run_id: str) -> None:
    """Log in at a control plane with a token, by a form and by a header, and read the earlier run."""
    by_hand.check("without a token it is refused", http.get("/v1/runs").status_code == 401)
    by_hand.check("a wrong token is refused", http.post("/login", data={"token": "wrong"}).status_code == 403)
    answer = http.post("/login", data={"token": TOKEN})
    by_hand.check("log-in", answer.status_code == 303 and "xtoken_session" in http.cookies)
    page = http.get(f"/runs/{run_id}")
    by_hand.check("the earlier run's page is read", page.status_code == 200 and "completed" in page.text.lower())
    http.cookies.clear()
    answer = http.get(f"/v1/runs/{run_id}", headers={"Authorization": f"Bearer {TOKEN}"})
    by_hand.check("its status by the bearer token", answer.json()["state"] == "completed")


def stop(by_hand: ByHand, service: ComposeService, process: subprocess.Popen[bytes]) -> None:
    """Stop the service as an engine does, and look for what it has left."""
    grace = float(service.service["stop_grace_period"].removesuffix("s"))
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(grace)
    seconds = round(time.monotonic() - began, 1)
    by_hand.check("the service stops within its grace period", code == 0, exit_code=code, seconds=seconds)
    user = service.service["user"].partition(":")[0] if service.imitation.user else ""
    left = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and _owner(entry) == user]
    by_hand.check("no process of its user is left", not left or not user, user=user)


def _owner(entry: Path) -> str:
    try:
        return str(entry.stat().st_uid)
    except OSError:
        return "ended"


def by_hand_in(folder: Path, by_hand: ByHand, device: str, report: dict[str, Any]) -> None:
    """Make the service's folders below one, start it twice and check it; adds machine and service to the report."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = read_settings(ROOT / ".env") | {"XTOKEN_PORT": str(port)}
    service = read_service("xtoken", FILES[:1], settings)
    remote = read_service("xtoken", FILES, settings)
    folder.chmod(0o755)
    imitation = Imitation.of(service["user"], folder)
    folders = {f"/{name}": folder / name for name in ("data", "runs", "cache")}
    for inner in folders.values():
        inner.mkdir()
    make_assets(folders["/data"])
    secret = folder / "control-token"
    secret.touch(mode=0o600)
    secret.write_text(TOKEN)
    image = read_image(ROOT / "deploy" / "Dockerfile", "gpu")
    program = copy_program(folder / "program")
    plain = ComposeService(service, image, folders, program, imitation)
    guarded = ComposeService(remote, image, folders | {"/run/secrets/control-token": secret}, program, imitation)
    body = run_body(plain, folders["/data"], device, 4800 if device == "cuda" else 640)
    open_to_all(folders["/data"])
    if imitation.user:
        for owned in (folders["/runs"], folders["/cache"], secret):
            os.chown(owned, *(int(number) for number in service["user"].split(":")))
    report |= {
        "device": torch_device(device),
        "command": plain.command()[2:],
        "environment": sorted(plain.environment()),
        "not_imitated": imitation.missing(),
    }
    print(json.dumps(report, indent=2), flush=True)
    for each, use in ((plain, "plain"), (guarded, "remote")):
        log = folder / f"{use}.log"
        process = each.start(log)
        try:
            by_hand.wait(f"the health check succeeds ({use})", each.healthy, process)
            check_process(by_hand, each, process.pid)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                if each is plain:
                    run_id = run_by_rest(by_hand, http, process, body)
                else:
                    check_token(by_hand, http, run_id)
            stop(by_hand, each, process)
        except BaseException:
            print(log.read_text(encoding="utf-8")[-3000:], flush=True)
            raise
        finally:
            end(process)
            each.clean()


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
