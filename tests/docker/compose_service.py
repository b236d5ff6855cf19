"""A service of the Compose file started without a container engine: command, environment, limits, health check."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PASSED_ON = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
"""Variables by which this machine, and not the image, makes its GPUs known."""


def read_settings(path: Path) -> dict[str, str]:
    """Return the variables of an `.env` file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def read_service(name: str, file: Path, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return a service of a Compose file, its variables filled in."""
    text = re.sub(
        r"\$\{(\w+)(?::-([^}]*))?\}",
        lambda found: settings.get(found[1]) or found[2] or "",
        file.read_text(encoding="utf-8"),
    )
    return dict(yaml.safe_load(text)["services"][name])


def read_image(dockerfile: Path, target: str) -> dict[str, Any]:
    """Return environment and entry point of a stage of a Dockerfile and of those below it."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    stages: dict[str, dict[str, Any]] = {}
    stage: dict[str, Any] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            below, _, name = rest.partition(" AS ")
            stage = stages[name] = {**stages.get(below, {}), "env": dict(stages.get(below, {}).get("env", {}))}
        elif word == "ENV":
            stage["env"] |= dict(part.split("=", 1) for part in shlex.split(rest))
        elif word == "ENTRYPOINT":
            stage["entrypoint"] = json.loads(rest)
    return stages[target]


class ComposeService:
    """A service of the Compose file, to start here.

    Args:
        service: The service.
        image: What the Dockerfile's stage sets.
        folders: By path in the container: folders of this machine.
    """

    def __init__(self, service: Mapping[str, Any], image: Mapping[str, Any], folders: Mapping[str, Path]) -> None:
        self.service, self._image, self._folders = service, image, folders

    def inside(self, path: str) -> str:
        """Return a path of the container as the started processes see it."""
        for name, folder in self._folders.items():
            if path == name or path.startswith(f"{name}/"):
                return str(folder) + path.removeprefix(name)
        return path

    def environment(self) -> dict[str, str]:
        """Return the environment of the service's processes: the image's and the service's, not this process's."""
        own = {key: self.inside(value) for key, value in self._image["env"].items()}
        own["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        own["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "services")])
        passed = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
        return own | passed | self.service.get("environment", {})

    def command(self) -> list[str]:
        """Return the service's command line, its program being `python -m xtoken_services.cli`."""
        assert self._image["entrypoint"] == ["xtoken"]
        arguments = [self.inside(str(word)) for word in self.service["command"]]
        return [sys.executable, "-P", "-m", "xtoken_services.cli", *arguments]

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        """Start the service; its output goes to a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(), env=self.environment(), stdout=output, stderr=output, start_new_session=True,
                preexec_fn=self._limit,  # this process has no threads when it starts the service
            )  # fmt: skip

    def healthy(self) -> bool:
        """Run the service's health check."""
        kind, *words = self.service["healthcheck"]["test"]
        assert kind == "CMD"
        command, environment = [sys.executable, *words[1:]], self.environment()
        seconds = float(self.service["healthcheck"]["timeout"].removesuffix("s"))
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds, check=False, env=environment)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _limit(self) -> None:
        for name, value in self.service.get("ulimits", {}).items():
            soft, hard = (value["soft"], value["hard"]) if isinstance(value, dict) else (value, value)
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))
