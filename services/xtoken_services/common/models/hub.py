"""Models and texts of the Hugging Face Hub: found by their ids, pinned to a commit, fetched as plain files. No torch.

Only weights, tokenizers, configurations and text are fetched, never code. `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and the
other variables of `huggingface_hub` mean here what they mean there. Text at another address is fetched once into the
user's cache: a run's records are those of files that stay.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from xtoken_core.atomic import atomic_path
from xtoken_core.config.base import absolute_path
from xtoken_core.config.data import MOST_TEXT_BYTES, READ_SUFFIXES, TEXT_FORMS, TEXT_SUFFIXES
from xtoken_core.errors import InputError, first_line
from xtoken_core.user_cache import user_cache
from xtoken_services.common.models.gguf import gguf_model, is_gguf
from xtoken_services.common.processes.progress import spinner

HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.][\w./-]*))?(:(?P<files>[^:]+))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
)
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "README.md")
NOT_FETCHED = ("*/*", "consolidated*", "*.py")
"""Files in folders, weights in another form, code."""
DATASET = "datasets/"
"""Begins the name of a data set among the pinned commits."""
SILENCE_S = 60.0
"""Seconds without a byte after which a server is given up."""
PART_BYTES = 1 << 22


@dataclass(frozen=True)
class HubId:
    """A repository as a run file names it: `org/name`, `org/name@revision`; of a data set also `…:train/*.parquet`.

    Attributes:
        repo: `org/name`.
        revision: Branch, tag or commit; None: the default branch.
        files: Pattern of the data set's files; None: those of its training split.
    """

    repo: str
    revision: str | None
    files: str | None

    @property
    def requested(self) -> str:
        """Repository and revision as they were given."""
        return self.repo + (f"@{self.revision}" if self.revision else "")


def hub_id(value: Any, base: Path, *, data: bool = False) -> HubId | None:
    """Return the id that a setting names; None for a path.

    A name of something that exists, or that begins with a directory that does, is a path.

    Args:
        value: Value of the setting.
        base: Directory of relative paths.
        data: The setting names text.
    """
    match = HUB_ID.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match["files"] and not data):
        return None
    local = (base / value, base / match["repo"].partition("/")[0])
    if any(os.path.lexists(path) for path in local) or (
        not match["files"] and value.endswith((*READ_SUFFIXES, ".gguf"))
    ):
        return None
    return HubId(match["repo"], match["revision"], match["files"])


class Hub:
    """Fetches repositories, at the commits that a run has already pinned.

    Args:
        pinned: Commits by `org/name` or `org/name@revision` as given, from an earlier start of the run.

    Attributes:
        commits: Commits of what was fetched, in the same form.
    """

    def __init__(self, pinned: Mapping[str, str]) -> None:
        self.pinned = {requested: commit for requested, commit in pinned.items() if COMMIT.fullmatch(str(commit))}
        self.commits: dict[str, str] = {}

    def model(self, name: str, repository: HubId, *, tokenizer_only: bool = False) -> Path:
        """Return the directory of a model, fetched first if need be.

        Args:
            name: The setting, for messages.
            repository: The repository.
            tokenizer_only: Leave out the weights.

        Raises:
            InputError: It cannot be fetched, or has no `.safetensors` weights.
        """
        patterns = TOKENIZER_FILES if tokenizer_only else MODEL_FILES + TOKENIZER_FILES
        path = self._fetch(name, repository, "model", patterns, NOT_FETCHED)
        if not tokenizer_only and not any(path.glob("*.safetensors")):
            raise InputError(
                f"{name}: {repository.requested} on the Hub has no .safetensors weights: name another model"
            )
        return path

    def text(self, name: str, repository: HubId) -> list[Path]:
        """Return the files of a data set, fetched first if need be.

        Raises:
            InputError: They cannot be fetched, or there is none that is read.
        """
        listed = self._listed(name, repository)
        chosen = _chosen(listed, repository.files)
        if not chosen:
            raise InputError(
                f"{name}: {repository.requested} on the Hub has no {TEXT_FORMS} file"
                + (f" that matches {repository.files!r}" if repository.files else "")
                + f": it has {', '.join(listed[:5]) or 'none at all'}"
            )
        kinds = {Path(each).suffix for each in chosen}
        if len(kinds) > 1:
            raise InputError(
                f"{name}: {repository.requested} on the Hub has several kinds of files ({', '.join(sorted(kinds))}): "
                f'name some, such as "{repository.requested}:*{min(kinds)}"'
            )
        path = self._fetch(name, repository, "dataset", chosen, ())
        return [path / each for each in chosen]

    def _listed(self, name: str, repository: HubId) -> list[str]:
        """Return the names of the files of a data set; without a connection, of what the cache has of it."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        pinned = self.pinned.get(DATASET + repository.requested)
        cached = self._cached(repository, "dataset", pinned)
        if pinned is None or cached is None:
            try:
                api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
                about = api.dataset_info(repository.repo, revision=pinned or repository.revision)
                return sorted(file.rfilename for file in about.siblings or ())
            except (RepositoryNotFoundError, RevisionNotFoundError) as error:
                raise _refused(name, repository, "dataset", error) from error
            except Exception as error:  # no connection, or a server that answers otherwise
                if cached is None:
                    raise _refused(name, repository, "dataset", error) from error
        return sorted(str(file.relative_to(cached)) for file in cached.rglob("*") if file.is_file())

    def _fetch(self, name: str, repository: HubId, kind: str, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
        key = (DATASET if kind == "dataset" else "") + repository.requested
        pinned = self.pinned.get(key)
        # A cached one is whole: it is pinned once it has been fetched.
        path = self._cached(repository, kind, pinned) if pinned else None
        if path is None:
            from huggingface_hub import snapshot_download
            from huggingface_hub.utils.tqdm import disable_progress_bars

            if not sys.stderr.isatty():
                disable_progress_bars()
            what = _hub_options() | {"repo_type": kind, "revision": pinned or repository.revision}
            what |= {"allow_patterns": list(patterns), "ignore_patterns": list(ignored)}
            try:
                with spinner(f"getting {repository.requested} from the Hub"):
                    path = Path(snapshot_download(repository.repo, **what))
            except Exception as error:  # of the library, its HTTP client, or the disk
                raise _refused(name, repository, kind, error) from error
        self.commits[key] = path.name
        return path

    def _cached(self, repository: HubId, kind: str, commit: str | None) -> Path | None:
        """Return the cached snapshot of a repository at a commit (None: the revision's last known one), if any."""
        from huggingface_hub.constants import HF_HUB_CACHE

        root = Path(_hub_options()["cache_dir"] or HF_HUB_CACHE) / f"{kind}s--{repository.repo.replace('/', '--')}"
        try:
            commit = commit or (root / "refs" / (repository.revision or "main")).read_text("ascii").strip()
        except (OSError, ValueError):
            return None
        if not COMMIT.fullmatch(commit):
            return None
        path = root / "snapshots" / commit
        return path if path.is_dir() else None


def _hub_options() -> dict[str, Any]:
    """Return endpoint and cache as the environment names them now; the library reads it once, when it is imported."""
    home = os.environ.get("HF_HOME")
    cache = os.environ.get("HF_HUB_CACHE") or (str(Path(home) / "hub") if home else None)
    return {"endpoint": os.environ.get("HF_ENDPOINT"), "cache_dir": cache}


def _chosen(names: Sequence[str], pattern: str | None) -> list[str]:
    """Return the files of a data set that match a pattern; without one, those of the training split if it has one."""
    if pattern is not None:
        return [name for name in names if name.endswith(READ_SUFFIXES) and fnmatch.fnmatch(name, pattern)]
    texts = [name for name in names if name.endswith(TEXT_SUFFIXES)]
    texts = [name for name in texts if not name.endswith(".txt")] or texts
    return [name for name in texts if "train" in name] or texts


def _refused(name: str, repository: HubId, kind: str, error: Exception) -> InputError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    begin = f"{name}: {repository.requested} is no path here, and as a {kind} of the Hub ({where}) it"
    if isinstance(error, GatedRepoError):
        return InputError(f"{begin} is gated: accept its terms there, and set HF_TOKEN")
    if isinstance(error, RepositoryNotFoundError):
        return InputError(f"{begin} does not exist, or is private: correct the name, or set HF_TOKEN")
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{begin} has no revision {repository.revision!r}: name a branch, a tag or a commit")
    reason = first_line(error)[:200]
    return InputError(
        f"{begin} cannot be fetched ({type(error).__name__}: {reason}): connect to the Hub, or correct the path"
    )


def fetch_inputs(document: dict[str, Any], base: Path, pinned: Mapping[str, str]) -> list[str]:
    """Replace Hub ids, addresses of text and GGUF files in a run file's document by paths, and store the commits.

    Args:
        document: The document, with models and text as tables. Its `hub` gets the commits.
        base: Directory of relative paths.
        pinned: `hub` of an earlier start.

    Returns:
        A line for everything that was taken from the Hub, an address or a GGUF file.

    Raises:
        InputError: Something cannot be fetched or converted.
    """
    notes: list[str] = []
    given = document.get("hub")
    hub = Hub({**(given if isinstance(given, dict) else {}), **pinned})
    teachers = document.get("teacher", ())
    keys = [f"teacher.{n}" if len(teachers) > 1 else "teacher" for n in range(len(teachers))]
    models = [("student", document.get("student")), *zip(keys, teachers, strict=True)]
    for name, table in models:
        for key in ("model", "tokenizer") if isinstance(table, dict) else ():
            if isinstance(table.get(key), str) and is_gguf(file := absolute_path(table[key], base)):
                table[key] = str(gguf_model(f"{name}.{key}", file))
                notes.append(f"{name}.{key}: {file} in {table[key]}")
            if (repository := hub_id(table.get(key), base)) is not None:
                table[key] = str(hub.model(f"{name}.{key}", repository, tokenizer_only=key == "tokenizer"))
    data = document.get("data")
    sources = data.get("sources", ()) if isinstance(data, dict) else ()
    texts = [("data", data), ("eval", document.get("eval")), *((f"data.sources.{n}", s) for n, s in enumerate(sources))]
    for name, table in texts:
        if isinstance(table, dict) and (repository := hub_id(table.get("path"), base, data=True)) is not None:
            files = [str(file) for file in hub.text(f"{name}.path", repository)]
            table["path"] = files if len(files) > 1 else files[0]
        if isinstance(table, dict) and "path" in table:
            several = table["path"] if isinstance(table["path"], list) else [table["path"]]
            fetched = [fetch_text(f"{name}.path", each) for each in several]
            notes += [line for _, lines in fetched for line in lines]
            table["path"] = [path for path, _ in fetched] if isinstance(table["path"], list) else fetched[0][0]
    if hub.commits:
        document["hub"] = hub.commits
    return notes + [f"hub: {requested} at commit {commit}" for requested, commit in hub.commits.items()]


def fetch_text(name: str, path: Any) -> tuple[Any, list[str]]:
    """Return a setting's path, or in place of an address the file that was fetched from it, and a line that says so.

    Args:
        name: The setting, for messages.
        path: Its value; an address has `://`, and a file's name at its end.

    Raises:
        InputError: It cannot be fetched whole, or has the name of no text.
    """
    if not isinstance(path, str) or "://" not in path:
        return path, []
    parts = urlsplit(path)
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"  # without keys, which may be in the rest
    file = PurePosixPath(parts.path).name
    if not file.lower().endswith(READ_SUFFIXES):
        raise InputError(f"{name}: {shown} does not end like a text: name a {TEXT_FORMS} file")
    target = user_cache() / "text" / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}-{file}"
    try:
        if not target.exists():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with spinner(f"fetching {shown}"):
                _fetch(path, target)
    except Exception as error:  # of the HTTP client, the file system of the address, or the disk
        answer = getattr(error, "response", None)  # whose error names the whole address
        reason = f"HTTP {answer.status_code}" if answer is not None else first_line(error)
        raise InputError(f"{name}: cannot fetch {shown}: {reason}") from error
    return str(target), [f"{name}: {shown} as it was fetched into {target}"]


def _fetch(address: str, target: Path) -> None:
    """Write the bytes at an address to a file; an answer that ends early raises."""
    with atomic_path(target) as scratch, scratch.open("wb") as out:
        for part in _parts(address):
            out.write(part)
            if out.tell() > MOST_TEXT_BYTES:
                raise ValueError(f"more than {MOST_TEXT_BYTES >> 30} GiB")


def _parts(address: str) -> Iterator[bytes]:
    """Yield the bytes at an address of HTTP, or of what `fsspec` can open, which names a package that it lacks."""
    if not address.startswith(("http://", "https://")):
        import fsspec  # type: ignore[import-untyped] # it has no stubs

        with fsspec.open(address, "rb") as file:
            yield from iter(lambda: file.read(PART_BYTES), b"")
        return
    import httpx

    headers = {"Accept-Encoding": "identity"}  # a file that is compressed arrives as it is
    with httpx.stream("GET", address, headers=headers, follow_redirects=True, timeout=SILENCE_S) as answer:
        answer.raise_for_status()
        yield from answer.iter_raw()
