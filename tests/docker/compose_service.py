"""A service of the Compose file started without a container engine: command, user, environment, mounts, limits."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PASSED_ON = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
"""Variables by which this machine, and not the image, makes its GPUs known."""
NOT_IMITATED = (
    "the image's files: the interpreter and the packages are this machine's, the program is a copy of the tree's",
    "an init as process 1, and a namespace of processes",
    "the NVIDIA container runtime: the devices and the driver's libraries are this machine's",
    "the default seccomp and AppArmor profiles of an engine, and its network",
    "the restart policy",
)


def read_settings(path: Path) -> dict[str, str]:
    """Return the variables of an `.env` file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def read_service(name: str, files: Sequence[Path], settings: Mapping[str, str]) -> dict[str, Any]:
    """Return a service as Compose merges it from files: later files replace values and extend lists of mounts."""
    service: dict[str, Any] = {}
    for file in files:
        text = re.sub(
            r"\$\{(\w+)(?::-([^}]*))?\}",
            lambda found: settings.get(found[1]) or found[2] or "",
            file.read_text(encoding="utf-8"),
        )
        for key, value in yaml.safe_load(text)["services"][name].items():
            service[key] = [*service.get(key, []), *value] if key in ("volumes", "secrets") else value
    return service


def read_image(dockerfile: Path, target: str) -> dict[str, Any]:
    """Return environment, working directory and entry point of a stage of a Dockerfile and of those below it."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    stages: dict[str, dict[str, Any]] = {}
    stage: dict[str, Any] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            below, _, name = rest.partition(" AS ")
            stage = stages[name] = {"env": dict(stages.get(below, {}).get("env", {}))} | {
                key: value for key, value in stages.get(below, {}).items() if key != "env"
            }
        elif word == "ENV":
            stage["env"] |= dict(part.split("=", 1) for part in shlex.split(rest))
        elif word in ("WORKDIR", "ENTRYPOINT", "USER"):
            stage[word.lower()] = json.loads(rest) if rest.startswith("[") else rest
    return stages[target]


def bytes_of(size: str) -> int:
    """Return a size as Compose writes it, in bytes."""
    number, unit = re.fullmatch(r"(\d+)([kmg]?)b?", size.lower()).groups()  # type: ignore[union-attr]
    return int(number) << {"": 0, "k": 10, "m": 20, "g": 30}[unit]


@dataclass(frozen=True)
class Imitation:
    """How far the service's surroundings can be imitated here.

    Attributes:
        user: The service's user and group can be taken, all capabilities dropped.
        mounts: A namespace of mounts: /data, /runs and /cache lie where the service has them, /dev/shm has its size.
    """

    user: bool
    mounts: bool

    @classmethod
    def of(cls, user: str, scratch: Path) -> Imitation:
        """Try both: the user needs an interpreter and packages that it may read."""
        # A shell between: the program that `setpriv` starts is still looked up with root's rights.
        python = [*as_user(user), "sh", "-c", 'exec "$@"', "sh", sys.executable, "-c", "import torch, transformers"]
        if os.getuid() != 0:
            return cls(False, False)
        if _succeeds(in_namespace(readable_prefixes(scratch), python)):
            return cls(True, True)
        return cls(_succeeds(python), False)

    def missing(self) -> list[str]:
        """Return what is not imitated, for the result."""
        found = list(NOT_IMITATED)
        if not self.user:
            found.append("the user and the dropped capabilities: this needs root, and packages that all may read")
        if not self.mounts:
            found.append("the mounts and the size of /dev/shm: a namespace of mounts cannot be made here")
        return found


def as_user(user: str) -> list[str]:
    """Return the command that runs another as the service's user, without capabilities or new privileges."""
    uid, gid = user.split(":")
    dropped = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *dropped]


def in_namespace(steps: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command that runs another after shell commands, in a namespace of mounts of its own."""
    script = "; ".join([*steps, 'exec "$@"'])
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", *command]


def readable_prefixes(scratch: Path) -> list[str]:
    """Return mounts that show the interpreter and the packages to a user who may not enter a folder above them.

    Args:
        scratch: A folder for mount points.
    """
    needed = {Path(sys.prefix), Path(sys.base_prefix), *(Path(entry) for entry in sys.path if Path(entry).is_dir())}
    needed |= {path.resolve() for path in needed}
    closed: dict[Path, list[Path]] = {}
    for path in sorted(needed):
        above = [folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001]
        if above and not any(path.is_relative_to(other) for other in closed.get(above[0], [])):
            closed.setdefault(above[0], []).append(path)
    steps = []
    for folder, paths in closed.items():
        kept = {path: scratch / f"mount-{len(steps)}-{number}" for number, path in enumerate(paths)}
        steps += [f"mkdir -p {_q(at)}; mount --bind {_q(path)} {_q(at)}" for path, at in kept.items()]
        steps.append(f"mount -t tmpfs -o mode=0755 tmpfs {_q(folder)}")
        steps += [f"mkdir -p {_q(path)}; mount --bind {_q(at)} {_q(path)}" for path, at in kept.items()]
    return steps


def _q(path: Path) -> str:
    return shlex.quote(str(path))


class ComposeService:
    """A service of the Compose file, to start here.

    Args:
        service: The merged service.
        image: What the Dockerfile's stage sets.
        folders: By path in the container: folders or files of this machine; /data is mounted read only.
        program: Folder with a copy of the packages, as the image has them.
        imitation: What can be imitated.
    """

    def __init__(
        self,
        service: Mapping[str, Any],
        image: Mapping[str, Any],
        folders: Mapping[str, Path],
        program: Path,
        imitation: Imitation,
    ) -> None:
        self.service, self.imitation = service, imitation
        self._image, self._folders, self._program = image, folders, program
        self._made: list[Path] = []

    def inside(self, path: str) -> str:
        """Return a path of the container as the started processes see it."""
        if self.imitation.mounts:
            return path
        for name, folder in self._folders.items():
            if path == name or path.startswith(f"{name}/"):
                return str(folder) + path.removeprefix(name)
        return path

    def environment(self) -> dict[str, str]:
        """Return the environment of the service's processes: the image's and the service's, not this process's."""
        own = {key: self.inside(value) for key, value in self._image["env"].items()}
        own["PATH"] = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        passed = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
        paths = {"PYTHONPATH": os.pathsep.join([str(self._program), *self._packages()])}
        return own | passed | self.service.get("environment", {}) | paths

    @staticmethod
    def _packages() -> list[str]:
        """Return the directories of packages that only this process's PYTHONPATH names: an image has them installed."""
        named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        return [
            path for path in named if path and Path(path).is_dir() and not (Path(path) / "xtoken_services").is_dir()
        ]

    def command(self) -> list[str]:
        """Return the service's command line, its program being `python -m xtoken_services.cli`."""
        assert self._image["entrypoint"] == ["xtoken"]
        arguments = [self.inside(str(word)) for word in self.service["command"]]
        return [sys.executable, "-P", "-m", "xtoken_services.cli", *arguments]

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        """Start the service; its output goes to a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self._wrapped(self.command()),
                env=self.environment(),
                cwd=None if self.imitation.mounts else self.inside(self._image["workdir"]),
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=self._limit,  # this process has no threads when it starts the service
            )

    def healthy(self) -> bool:
        """Run the service's health check."""
        kind, *words = self.service["healthcheck"]["test"]
        assert kind == "CMD"
        seconds = float(self.service["healthcheck"]["timeout"].removesuffix("s"))
        try:
            return _succeeds([sys.executable, *words[1:]], seconds, self.environment())
        except subprocess.TimeoutExpired:
            return False

    def _wrapped(self, command: list[str]) -> list[str]:
        user = as_user(self.service["user"]) if self.imitation.user else []
        if not self.imitation.mounts:
            return [*user, *command]
        steps = readable_prefixes(self._program.parent)
        steps += [f"mount -t tmpfs -o mode=1777,size={bytes_of(self.service['shm_size'])} tmpfs /dev/shm"]
        for name, source in self._folders.items():
            self._make(Path(name), source.is_dir())
            steps.append(f"mount --bind {_q(source)} {name}")
            if any(str(volume).endswith(f":{name}:ro") for volume in self.service["volumes"]):
                steps.append(f"mount -o remount,bind,ro {name}")
        return in_namespace([*steps, f"cd {self._image['workdir']}"], [*user, *command])

    def _make(self, target: Path, folder: bool) -> None:
        """Make a mount's target, on this machine; `clean` removes it."""
        new = [path for path in (target, *target.parents) if not path.exists()]
        for path in reversed(new):
            if path != target or folder:
                path.mkdir()
            else:
                path.touch()
            self._made.append(path)

    def clean(self) -> None:
        """Remove the mounts' targets that were made; they are empty."""
        for path in reversed(self._made):
            path.rmdir() if path.is_dir() else path.unlink()
        self._made.clear()

    def _limit(self) -> None:
        for name, value in self.service.get("ulimits", {}).items():
            soft, hard = (value["soft"], value["hard"]) if isinstance(value, dict) else (value, value)
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))


def copy_program(folder: Path) -> Path:
    """Copy the packages that the image installs, readable by all."""
    for source in (ROOT / "xtoken_core", ROOT / "services" / "xtoken_services"):
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return open_to_all(folder)


def open_to_all(folder: Path) -> Path:
    """Let every user read a folder and all that it holds."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def _succeeds(command: Sequence[str], seconds: float = 120, environment: Mapping[str, str] | None = None) -> bool:
    done = subprocess.run(command, capture_output=True, timeout=seconds, check=False, env=environment)
    return done.returncode == 0
