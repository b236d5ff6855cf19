"""The documents say what the program does: fields, commands, messages, run files and links are looked up."""

import ast
import importlib.util
import json
import re
import tomllib
import typing
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer

import xtoken_core.errors
from tests.doc_blocks import PAGES, ROOT, commands_of, fenced
from xtoken_core.config.base import ConfigModel
from xtoken_core.config.spec import parse_run_spec
from xtoken_services.cli.app import app
from xtoken_services.control.app import create_app
from xtoken_services.control.runs import Runs


@cache
def generator() -> ModuleType:
    """`docs/generate.py` as a module."""
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_pages_are_in_step_with_the_code() -> None:
    assert generator().out_of_step() == [], "run: python docs/generate.py"


def test_every_field_of_a_run_file_is_explained() -> None:
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    unexplained = [line for line in page.splitlines() if "|  |" in line]
    assert unexplained == []
    required = {line.split("`")[1] for line in page.splitlines() if "| required |" in line}
    assert required == {"model", "path"}, "a default by context is one"


def test_every_setting_is_explained_in_its_model() -> None:
    module = generator()
    for _, model in module.sections_of(module.RunSpec):
        parts = {name for name, field in model.model_fields.items() if is_part(field.annotation)}
        unexplained = model.model_fields.keys() - model.descriptions().keys()
        assert unexplained <= parts, model.__name__


def is_part(annotation: object) -> bool:
    """Whether a field is a section of its own, which its model explains."""
    inner = typing.get_args(annotation)[:1] or (annotation,)
    return any(isinstance(part, type) and issubclass(part, ConfigModel) for part in inner)


def test_every_request_has_a_curl_line_of_its_own(tmp_path: Path) -> None:
    sections = re.findall(
        r"^## (GET|POST|PUT|DELETE) (\S+)\n(.*?)(?=^## )", (ROOT / "docs/rest.md").read_text("utf-8"), re.M | re.S
    )
    described = create_app(Runs(tmp_path)).openapi()["paths"]
    assert len(sections) == sum(map(len, described.values()))
    for method, path, text in sections:
        ((words,),) = [commands_of(block) for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)]
        *options, url = words
        assert options[0] == "curl" and (options[options.index("-X") + 1] if "-X" in options else "GET") == method
        assert re.fullmatch(r"http://127\.0\.0\.1:8400" + re.sub(r"{\w+}", r"[\\w./-]+", path), url)
        assert ("-d" in options) == ("requestBody" in described[path][method.lower()])
        if "-d" in options and path != "/v1/runs":
            assert isinstance(json.loads(options[options.index("-d") + 1]), str)
        elif "-d" in options:
            body = json.loads(options[options.index("-d") + 1])
            model = {"context_length": 8}
            filled = {
                **body,
                "output": "/out",
                "student": {**body["student"], **model},
                "teacher": [{**t, **model} for t in body["teacher"]],
            }
            parse_run_spec(filled, source="docs/rest.md")


def test_decisions_are_numbered_and_begin_with_a_bold_sentence() -> None:
    page = (ROOT / "docs/decisions.md").read_text("utf-8")
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    numbers = [int(heading.partition(". ")[0]) for heading in headings]
    assert numbers == sorted(set(numbers))
    bold = re.findall(r"^## (.+)\n\n\*\*[^*]+?\*\*", page, re.MULTILINE)
    assert [heading for heading in headings if heading not in bold] == []


def test_the_glossary_names_modules_that_exist() -> None:
    page = (ROOT / "docs/glossary.md").read_text("utf-8")
    modules = re.findall(r"\| `([\w/]+\.py)` \|$", page, re.MULTILINE)
    assert len(modules) == len(re.findall(r"^\| (?!term|---)", page, re.MULTILINE)) >= 25
    assert [name for name in modules if not (ROOT / name).is_file()] == []


def test_the_environment_variables_of_options_are_told() -> None:
    page = (ROOT / "docs/cli.md").read_text("utf-8")
    for _, command in generator().commands_of(typer.main.get_command(app), ("xtoken",)):
        assert all(f"`{option.envvar}`" in page for option in command.params if getattr(option, "envvar", None))
    assert "XTOKEN_CONTROL" in page


def test_every_exit_status_is_in_the_table() -> None:
    errors = [e for e in vars(xtoken_core.errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    table = (ROOT / "docs/cli.md").read_text("utf-8").partition("## Exit statuses")[2]
    assert {str(e.exit_code) for e in errors} <= set(re.findall(r"^\| (\d+)", table, re.MULTILINE))


@pytest.mark.parametrize("page", [page for page in PAGES if fenced(page, "toml")], ids=lambda page: page.name)
def test_a_run_file_in_a_document_is_one(page: Path) -> None:
    for block in fenced(page, "toml"):
        document = tomllib.loads(block)
        document.setdefault("output", "runs/run")  # these `xtoken run` takes from the file's name and the models
        teachers = document.get("teacher", [])
        for side in (document["student"], *(teachers if isinstance(teachers, list) else [teachers])):
            side.setdefault("context_length", 512)
        parse_run_spec(document, source=page.name)


@cache
def texts_of_the_source() -> list[str]:
    """Every piece of text in the program but its docstrings, f-strings cut at their values."""
    found = []
    for folder in ("services", "xtoken_core"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            remarks = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            found += [str(text.value) for text in texts if id(text) not in remarks]
    return found


def messages() -> list[str]:
    """The messages that the page on troubleshooting explains."""
    return re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_a_message_that_is_explained_is_one_of_the_programs(message: str) -> None:
    parts = [part for part in message.split("…") if len(part.strip(" :")) > 1]
    assert parts
    for part in parts:
        assert any(part in text for text in texts_of_the_source()), f"nobody says {part!r}"


def anchor_of(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(anchor_of, headings), f"{page.name} links to {link}"
