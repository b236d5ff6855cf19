"""The interface on a page of our own, from its OpenAPI: the page that FastAPI ships needs another host's scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from services.control.web.render import PageRoute, page

router = APIRouter(route_class=PageRoute)


@dataclass(frozen=True)
class Row:
    """A parameter of a request, or a field of an object.

    Attributes:
        place: Where a parameter stands: `path`, `query`, `header` or `body`; empty for a field.
        takes: Its type in words, and the object's name where it is one.
    """

    name: str
    place: str
    takes: str
    ref: str
    required: bool
    meaning: str


@router.get("/docs")
def show(request: Request) -> Response:
    """Every request and every object."""
    described = request.app.openapi()
    operations = [
        {
            "method": method.upper(), "path": path, "said": operation.get("description") or operation["summary"],
            "rows": _parameters(operation),
            "answers": [
                (status, answer.get("description", ""), _carried(answer))
                for status, answer in sorted(operation["responses"].items())
            ],
        }
        for path, ways in described["paths"].items()
        for method, operation in ways.items()
    ]  # fmt: skip
    objects = [
        {
            "name": name, "said": " ".join(schema.get("description", "").split()), "values": schema.get("enum", ()),
            "rows": _fields(schema),
        }
        for name, schema in described["components"]["schemas"].items()
    ]  # fmt: skip
    return page(request, "reference.html", operations=operations, objects=objects)


def _parameters(operation: dict[str, Any]) -> list[Row]:
    rows = [
        Row(p["name"], p["in"], *in_words(p["schema"]), p.get("required", False), p.get("description", ""))
        for p in operation.get("parameters", ())
    ]
    if body := operation.get("requestBody"):
        (content,) = body["content"].values()
        rows.insert(0, Row("the body", "JSON", *in_words(content["schema"]), True, ""))
    return rows


def _fields(schema: dict[str, Any]) -> list[Row]:
    required = schema.get("required", ())
    return [
        Row(name, "", *in_words(part), name in required, " ".join(part.get("description", "").split()))
        for name, part in schema.get("properties", {}).items()
    ]


def _carried(answer: dict[str, Any]) -> tuple[str, str]:
    """What a response carries: in words, and the object's name."""
    for kind, content in answer.get("content", {}).items():
        words, ref = in_words(content.get("schema", {}))
        return (words, ref) if ref else (kind, "")
    return "", ""


def in_words(schema: dict[str, Any]) -> tuple[str, str]:
    """A JSON schema in words, and the name of the object in it.

    >>> in_words({"anyOf": [{"type": "array", "items": {"$ref": "#/components/schemas/Note"}}, {"type": "null"}]})
    ('list of Note or null', 'Note')
    """
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return name, name
    if "const" in schema or "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")])), ""
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options:
        found = [in_words(option) for option in options]
        return " or ".join(dict.fromkeys(words for words, _ in found)), next((ref for _, ref in found if ref), "")
    if schema.get("type") == "array":
        words, ref = in_words(schema.get("items", {}))
        return f"list of {words}", ref
    return str(schema.get("type", "any")), ""
