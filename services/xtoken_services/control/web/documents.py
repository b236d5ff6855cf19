"""The documents of this version as pages: the Markdown files that are installed with it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from markdown_it import MarkdownIt
from markupsafe import Markup

from xtoken_services.control.web.render import HEADERS, PageRoute, page

HOMES = Path(__file__).parents[2] / "documents", Path(__file__).parents[4] / "docs"
"""Their directory in an installed package, and in a checkout."""
FILES = ("*.md", "operators/*.md", "img/*")

router = APIRouter(route_class=PageRoute)


@router.get("/guide/{name:path}")
def show_document(request: Request, name: Annotated[str, PathParameter(max_length=200)]) -> Response:
    """Show a document, or return a picture of one."""
    file = documents().get(name)
    if file is None:
        raise HTTPException(404, f"There is no document {name}: files of the repository are not installed.")
    if file.suffix != ".md":
        return FileResponse(file, headers=HEADERS)
    return page(request, "document.html", name=name, document=rendered(file))


@cache
def documents() -> dict[str, Path]:
    """Return the files by their names in the links of other documents."""
    home = next(home for home in HOMES if home.is_dir())
    return {f"docs/{file.relative_to(home).as_posix()}": file for pattern in FILES for file in home.glob(pattern)}


@cache
def rendered(file: Path) -> Markup:
    """Return a document as HTML, its headings with the names that links have for them."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = markdown.parse(file.read_text("utf-8"))
    for token, text in pairwise(tokens):
        token.attrs.pop("style", None)  # which this site's policy refuses
        if token.type == "heading_open":
            kept = "".join(c for c in text.content.lower() if c.isalnum() or c in " -_")
            token.attrSet("id", kept.strip().replace(" ", "-"))
    return Markup(markdown.renderer.render(tokens, markdown.options, {}))
