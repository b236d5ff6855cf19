"""Attacks by the directory of a run that is over: its files are replaced while the control plane shows them."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.attack.files import KINDS, SECRET, fifo, link_outside
from tests.attack.http_client import expect_refusal
from tests.attack.target import Attack, FaultError, Target

ROUTES = (
    "/v1/runs/{id}", "/v1/runs/{id}/metrics", "/v1/runs/{id}/notes", "/v1/runs/{id}/logs", "/v1/runs/{id}/logs/files",
    "/v1/runs/{id}/artifacts", "/v1/runs/{id}/artifacts/steps.jsonl", "/v1/runs/{id}/artifacts/run.json",
    "/runs/{id}", "/runs/{id}/live", "/runs/{id}/log", "/runs/{id}/files", "/runs/{id}/configuration", "/v1/runs", "/",
)  # fmt: skip
MOST_BYTES = 1 << 20
SLOW_S = 3.0
"""Longest time that an answer about the attacked run may take."""


def show_everything(target: Target, what: str) -> None:
    """Ask for all that is shown of the run.

    Raises:
        FaultError: An answer fails, takes long, or holds a file outside the run.
    """
    with target.http() as http:
        for route in ROUTES:
            path, began = route.format(id=target.victim), target.clock.now()
            with http.stream("GET", path) as response:
                text = next(response.iter_raw(MOST_BYTES), b"")  # a file of any length may be downloaded
            if response.status_code >= 500:
                raise FaultError(f"{what}: HTTP {response.status_code} for GET {path}: {text[:200]!r}")
            if (waited := target.clock.since(began)) > SLOW_S:
                raise FaultError(f"{what}: GET {path} took {waited:.1f} s")
            if b"root:x:" in text:
                raise FaultError(f"{what}: GET {path} returned {SECRET}")


@contextmanager
def replaced(path: Path, kind: Callable[[Path], None]) -> Iterator[None]:
    """Replace a file or directory, and put the original back."""
    kept = path.with_name(f".{path.name}.kept")
    there = path.exists()
    if there:
        path.rename(kept)
    try:
        kind(path)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if there:
            kept.rename(path)


def hostile_records(target: Target, rng: random.Random, seconds: float) -> None:
    """Replace curves, records and logs by FIFOs, links, directories, huge and nested files."""
    output, end = target.victim_output, time.monotonic() + seconds
    logs = sorted((output / "logs").glob("*.log"))
    while time.monotonic() < end:
        file = rng.choice([output / "steps.jsonl", output / "eval.jsonl", output / "run.json", output / "summary.json",
                           output / "resolved.json", *logs])  # fmt: skip
        kind = rng.choice((*KINDS, long_line, odd_lines))
        with replaced(file, kind):
            show_everything(target, f"{file.name} by {kind.__name__}")


def hostile_directories(target: Target, rng: random.Random, seconds: float) -> None:
    """Replace the directories of logs and checkpoints by links and odd names."""
    del seconds
    output = target.victim_output
    kinds: list[Callable[[Path], None]] = [fifo, link_outside, linked_directory, odd_checkpoints, many_files]
    for name in ("logs", "checkpoints", "model"):
        for kind in rng.sample(kinds, len(kinds)):
            with replaced(output / name, kind):
                show_everything(target, f"{name} by {kind.__name__}")


def hostile_resume(target: Target, rng: random.Random, seconds: float) -> None:
    """Resume the run while its newest checkpoint is hostile: it must be refused, or end."""
    del rng
    output, end = target.victim_output, time.monotonic() + seconds
    with replaced(output / "checkpoints", fifo_checkpoint), target.http() as http:
        response = http.post(f"/v1/runs/{target.victim}/resume")
        expect_refusal(response, "a resume from a checkpoint whose run.json is a FIFO")
        while response.status_code == 202 and time.monotonic() < end:
            if http.get(f"/v1/runs/{target.victim}").json()["state"] in ("failed", "completed", "stopped"):
                break
            time.sleep(0.2)
        else:
            if response.status_code == 202:
                http.post(f"/v1/runs/{target.victim}/stop", json={"now": True})
                raise FaultError("a resume from a checkpoint whose run.json is a FIFO does not end")


def linked_checkpoints(target: Target, rng: random.Random, seconds: float) -> None:
    """Replace the checkpoints of a run that writes them by a link to another run's: those must stay as they are."""
    del seconds
    name = f"linked-{rng.randrange(1 << 30)}"
    output, other = target.runs / name, target.scratch("other")
    for step in range(9):
        (other / f"step-{step:08d}").mkdir(mode=0o700)
    before = sorted(other.iterdir())
    train = {**target.spec["train"], "checkpoint_every": 1, "keep_checkpoints": 1}
    changes = {"name": name, "output": str(output), "train": train, "workers": {"collators": 1, "device": "cpu"}}
    changes["workers"]["max_restarts"] = 0
    with target.http() as http:
        response = http.post("/v1/runs", json={**target.spec, **changes})
        if response.status_code != 201:
            raise FaultError(f"a run is refused: {response.text[:300]}")
        path, swapped = f"/v1/runs/{response.json()['id']}", False
        while http.get(path).json()["state"] not in ("failed", "completed", "stopped"):
            if not swapped and any((output / "checkpoints").glob("step-*")):
                (output / "checkpoints").rename(output / "moved")
                (output / "checkpoints").symlink_to(other)
                swapped = True
            time.sleep(0.005)
        http.delete(path, params={"files": True})
    if not swapped:
        raise FaultError("the run has written no checkpoint")
    if sorted(other.iterdir()) != before:
        raise FaultError(f"a run changed the checkpoints of another one: {sorted(p.name for p in other.iterdir())}")


def long_line(path: Path) -> None:
    """Write one line of 50 MB."""
    path.write_bytes(b"x" * 50_000_000)


def odd_lines(path: Path) -> None:
    """Write lines of JSON that are no rows."""
    lines = [
        "null",
        "[]",
        "1e999",
        '{"step": "x"}',
        '{"step": 1e30}',
        '{"step": -1, "loss": NaN}',
        "\x00",
        "[" * 50_000,
    ]
    path.write_text("\n".join(lines * 100) + "\n")


def linked_directory(path: Path) -> None:
    """Put a link to a directory outside."""
    path.symlink_to("/etc")


def odd_checkpoints(path: Path) -> None:
    """Make entries that look like checkpoints."""
    path.mkdir()
    for name in (
        "step-abcdefgh",
        "step-99999999",
        "step--0000001",
        "step-٠٠٠٠٠٠٠١",
        "trainer-0.1.log",
        "a.99999999999.log",
    ):
        (path / name).touch()


def many_files(path: Path) -> None:
    """Make twenty thousand files."""
    path.mkdir()
    for number in range(20_000):
        (path / f"trainer-{number}.1.log").touch()


def fifo_checkpoint(path: Path) -> None:
    """Make a newest checkpoint whose record is a FIFO."""
    (path / "step-99999999").mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    fifo(path / "step-99999999" / "run.json")


ATTACKS: dict[str, Attack] = {
    f"run_directory.{attack.__name__}": attack
    for attack in (hostile_records, hostile_directories, hostile_resume, linked_checkpoints)
}
