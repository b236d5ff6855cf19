"""A server with the part of the Hugging Face Hub's interface that runs use, over directories of this machine."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/([^/?]+))?(/[^?]*)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


@dataclass
class HubServer:
    """Repositories by kind and name, each with its files by commit or branch.

    Attributes:
        files: By `models/org/name` and revision, the content by file name.
        commits: By `models/org/name` and branch, its commit.
        requests: `METHOD path` of every request.
        uploads: By repository, the last commit's files.
        tokens: Of requests that had one.
    """

    url: str = ""
    files: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    commits: dict[str, dict[str, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    uploads: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)

    def add(self, repo: str, directory: Path, branch: str = "main") -> str:
        """Add the files of a directory as a commit of `models/org/name` or `datasets/org/name`; return the commit."""
        content = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        commit = hashlib.sha1(repr(sorted(content.items())).encode(), usedforsecurity=False).hexdigest()
        self.files.setdefault(repo, {})[commit] = content
        self.commits.setdefault(repo, {})[branch] = commit
        return commit

    def commit_of(self, repo: str, revision: str) -> str | None:
        """Return the commit of a revision."""
        return self.commits[repo].get(revision, revision if revision in self.files[repo] else None)


class HubHandler(BaseHTTPRequestHandler):
    """Answers requests to the Hub of its server."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code: str) -> None:
        self.answer(404, json.dumps({"error": code}).encode(), X_Error_Code=code, X_Error_Message=code)

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.headers.get("Authorization"):
            self.hub.tokens.add(self.headers["Authorization"])
        if match := API.fullmatch(self.path.partition("?")[0]):
            self.list(f"{match[1]}/{match[2]}", match[3] or "revision", match[4] or "main")
        elif match := FILE.match(self.path):
            self.file(("datasets/" if match[1] else "models/") + match[2], match[3], match[4])
        else:
            self.missing("EntryNotFound")

    do_HEAD = do_GET  # noqa: N815 - the base class looks for this name

    def list(self, repo: str, what: str, revision: str) -> None:
        if repo not in self.hub.files:
            return self.missing("RepoNotFound")
        commit = self.hub.commit_of(repo, revision)
        if commit is None:
            return self.missing("RevisionNotFound")
        files = self.hub.files[repo][commit]
        if what == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        about = {"id": repo.partition("/")[2], "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        return self.answer(200, json.dumps(about).encode(), Content_Type="application/json")

    def file(self, repo: str, revision: str, name: str) -> None:
        commit = self.hub.commit_of(repo, revision)
        content = self.hub.files.get(repo, {}).get(commit or "", {}).get(name)
        if content is None:
            return self.missing("EntryNotFound")
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        return self.answer(200, content, ETag=f'"{etag}"', X_Repo_Commit=str(commit))

    def do_POST(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/validate-yaml":
            return self.answer(200, b'{"errors": [], "warnings": []}')
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.hub.files.setdefault(f"models/{repo}", {})
            self.hub.commits.setdefault(f"models/{repo}", {})
            return self.answer(200, json.dumps({"url": f"{self.hub.url}/{repo}", "id": repo}).encode())
        match = API.fullmatch(self.path.partition("?")[0])
        if match is None:
            return self.missing("EntryNotFound")
        if match[3] == "preupload":
            files = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(body)["files"]]
            return self.answer(200, json.dumps({"files": files}).encode())
        lines = [json.loads(line) for line in body.splitlines()]
        added = [line["value"] for line in lines if line["key"] == "file"]
        self.hub.uploads[match[2]] = {each["path"]: base64.b64decode(each["content"]) for each in added}
        about = {"commitUrl": f"{self.hub.url}/{match[2]}/commit/{'a' * 40}", "commitOid": "a" * 40, "success": True}
        return self.answer(200, json.dumps(about).encode())


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve an empty Hub on loopback."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
