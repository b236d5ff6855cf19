"""MkDocs hooks: pages of the site that lie outside this folder, and their links.

Links are bent on the way, so that the same Markdown works in the tree and on the site. `mkdocs.yml` names this file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"index.md": "README.md", "protocol.md": "proto/README.md"}
"""Pages of the site, and the files of the tree that they are."""
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside this folder."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text with its links as the site has them."""
    name = page.file.src_uri
    home = ROOT / ELSEWHERE.get(name, f"docs/{name}")
    depth = name.count("/")

    def bent(match: re.Match[str]) -> str:
        words, link, anchor = match[1], match[2], match[3] or ""
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = (home.parent / link).resolve().relative_to(ROOT).as_posix()
        known = {source: place for place, source in ELSEWHERE.items()}
        if target in known:
            return f"[{words}]({'../' * depth}{known[target]}{anchor})"
        if target.startswith("docs/"):
            return f"[{words}]({'../' * depth}{target.removeprefix('docs/')}{anchor})"
        return words if words.startswith("`") else f"`{target}`" if words == link else f"{words} (`{target}`)"

    text = LINK.sub(bent, markdown)
    return text.replace("](docs/img/", "](img/") if name == "index.md" else text
