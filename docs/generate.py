"""Write the reference pages that follow from the code.

`configuration.md` from the models of a run, `cli.md` from the commands, `rest.md` from the control plane's OpenAPI,
`python.md` from signatures and docstrings.

python docs/generate.py          write them
python docs/generate.py --check  only say whether they are in step
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
import types
import typing
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "services")]

import xtoken  # noqa: E402
from xtoken.integrations import Distillation  # noqa: E402
from xtoken_core.config import RunSpec  # noqa: E402
from xtoken_services.cli.app import app  # noqa: E402 - found by the line above
from xtoken_services.common.run.defaults import FILLED  # noqa: E402
from xtoken_services.control.app import create_app  # noqa: E402
from xtoken_services.control.runs import Runs  # noqa: E402

MAKE = "python docs/generate.py"

COMMON = 3
"""Commands that share an argument or option from which on it is explained once."""
BY_CONTEXT = FILLED | {"name": "the file's name"}
"""Defaults that depend on something else, by setting."""
LONG = 6
"""Words of a field's meaning from which on an equal one is not repeated."""

CONFIGURATION = """# Configuration

A run is one TOML file. Every relative path in it is meant relative to the file itself. Unknown fields are refused, and
everything is checked before a process starts: an error names the field and what it takes.

<!-- Written by `{make}` from the models in xtoken_core/config: change those, not this. -->

{sections}"""

CLI = """# Commands

`xtoken --help` shows the commands, `xtoken COMMAND --help` one of them. With `--debug` before the command, or
`XTOKEN_DEBUG=1` in the environment, an error shows its traceback, and workers log more.

With `--json` every command that has a result prints it as JSON: one document, or one object per line for a stream
(`--watch`, `--follow`, `xtoken run`). Progress goes to standard error, and only on a terminal.

`xtoken --install-completion` installs completion for your shell (bash, zsh, fish, PowerShell): commands, options, and
the run ids of the control plane.

<!-- Written by `{make}` from services/xtoken_services/cli: change that, not this. -->

## Common options

{common}

{sections}

## Exit statuses

| status | meaning |
|---|---|
| 0 | done, or shut down gracefully after SIGINT or SIGTERM: `xtoken queue`, `xtoken control`, the workers |
| 1 | failed, for the reason in the last line, such as an address in use |
| 2 | a setting or a file is wrong: a restart cannot fix it |
| 3 | the queue at the address does not answer, or refuses the client: check token and key |
| 75 | the queue has ended this worker's session: restart it |
| 129, 130, 143 | stopped by SIGHUP, SIGINT (Ctrl-C), SIGTERM before it was done: `xtoken run`, `xtoken demo` |
| 130 | the run that is watched was stopped: `xtoken runs` with `--watch` |
"""

REST = """# REST interface

Requests of `xtoken control`, generated from its OpenAPI description (`/openapi.json`, browsable at `/docs`).
[Authentication](operations.md#access-control) is `AUTH="Authorization: Bearer $(cat ~/.config/xtoken/control.token)"`
here. Times are ISO 8601 with a zone, sizes bytes.
A status from 400 on comes with a [Problem](#problem); any request may answer 400, 401, 403, 422 or 429.

<!-- Written by `{make}` from the control plane's OpenAPI: change services/xtoken_services/control, not this. -->

{requests}
## Errors

Every error is `application/problem+json`, a `Problem`:

{errors}
## Objects

The fields of `RunSpec` are those of a run file: see [configuration](configuration.md). An `AnyRunSpec` leaves
out what a run file may.

{objects}"""

PYTHON = """# From Python

<!-- Written by `{make}` from xtoken/distill.py, pair.py and integrations.py. -->

{sections}
"""


def sections_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every table of the TOML file with its model, in the file's order."""
    yield path, model
    for name, info in model.model_fields.items():
        part, several = _part(info.annotation)
        if part is not None:
            outer = f"{path.strip('[')}." if path else ""
            yield from sections_of(part, f"{'[[' if several else '['}{outer}{name}")


def _part(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the model behind a field that is a table of its own, and whether there may be several of them."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation, False
    several = typing.get_origin(annotation) is tuple
    for argument in typing.get_args(annotation):
        part, _ = _part(argument)
        if part is not None:
            return part, several
    return None, False


def type_in_words(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Return a field's type in the terms of TOML, with its bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner, *bounds = arguments
        spread = [b for item in bounds for b in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return type_in_words(inner, tuple(spread))
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_in_words(a, metadata) for a in arguments if a is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            item = type_in_words(arguments[0]).replace(" or ", "/")
            return f"list of {item}" if item.endswith("`") else f"list of {item}s"
        word, _, bounds = type_in_words(arguments[0]).partition(" ")
        return f"list of {len(arguments)} {word}s {bounds}".rstrip()
    if origin is dict:
        return f"table of {type_in_words(arguments[1])}s"
    words = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "path"}[annotation]
    return f"{words} {', '.join(filter(None, map(_bound, metadata)))}".rstrip()


def _bound(item: Any) -> str:
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if (value := getattr(item, name, None)) is not None:
            return f"{sign} {'2^63' if value == 2**63 else value}"
    return ""


def default_in_words(info: FieldInfo) -> str:
    """Return a field's default as TOML writes it."""
    if info.is_required():
        return "required"
    value = info.default
    if value is None or value in ((), {}):
        return "-"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return (
        f"`{list(value)}`" if isinstance(value, tuple) else f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
    )


def configuration() -> str:
    """Render the page about the run file."""
    sections = []
    required = {name for name, info in RunSpec.model_fields.items() if info.is_required()}
    explained: dict[tuple[str, str], str] = {}
    for path, model in sections_of(RunSpec):
        double = path.startswith("[[")
        title = f"`{path}{']]' if double else ']'}`" if path else "At the top of the file"
        if path == "[[teacher":
            title += f", or `{path[1:]}]` for a single one"
        texts = model.descriptions()
        rows = [
            f"| `{name}` | {type_in_words(info.annotation, tuple(info.metadata))} "
            f"| {BY_CONTEXT.get(f'{path}.{name}'.lstrip('[.')) or default_in_words(info)} "
            f"| {_meaning(name, texts.get(name, ''), path, explained)} |"
            for name, info in model.model_fields.items()
            if _part(info.annotation)[0] is None
        ]
        intro = " ".join((model.__doc__ or "").split())
        table = "\n".join(["| field | takes | default | meaning |", "|---|---|---|---|", *rows])
        needed = " Required." if path.strip("[") in required else " May be left out." if path else ""
        sections.append(f"## {title}\n\n{intro}{needed}\n\n{table}\n")
    return CONFIGURATION.format(make=MAKE, sections="\n".join(sections))


def _meaning(name: str, text: str, path: str, explained: dict[tuple[str, str], str]) -> str:
    """Return a field's meaning, or the table that has explained a field of this name and meaning before."""
    meaning = " ".join(text.split())
    if len(meaning.split()) < LONG:
        return meaning
    before = explained.setdefault((name, meaning), path)
    return meaning if before == path else f"As in `{before}{']]' if before.startswith('[[') else ']'}`."


def commands_of(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that does something, with the words that lead to it."""
    children = getattr(command, "commands", {})
    if not children or command.invoke_without_command:
        yield path, command
    for name, child in children.items():
        yield from commands_of(child, (*path, name))


def cli() -> str:
    """Render the page about the commands; arguments and options that several of them have are explained once."""
    commands = list(commands_of(typer.main.get_command(app), ("xtoken",)))
    counts = Counter(_row(parameter) for _, command in commands for parameter in command.params)
    common = [row for row, count in counts.items() if count >= COMMON]
    sections = []
    for path, command in commands:
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = _options(command)
        words = [*path, *(_argument(p) for p in arguments), *(["[OPTIONS]"] if options else [])]
        rows = [_row(parameter) for parameter in (*arguments, *options) if _row(parameter) not in common]
        table = "\n".join(["", "| argument | default | meaning |", "|---|---|---|", *rows, ""]) if rows else ""
        shared = ", ".join(f"`{_name(p)}`" for p in (*arguments, *options) if _row(p) in common)
        also = f"\nAlso {shared} ([common options](#common-options)).\n" if shared else ""
        text = " ".join((command.help or "").split())
        sections.append(f"## {' '.join(path)}\n\n{text}\n\n```\n{' '.join(words)}\n```\n{table}{also}")
    head = "\n".join(["| argument | default | meaning |", "|---|---|---|", *common])
    return CLI.format(make=MAKE, common=head, sections="\n".join(sections).rstrip())


def _options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _name(parameter: Any) -> str:
    return _argument(parameter) if parameter.param_type_name == "argument" else str(parameter.opts[0])


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if parameter.param_type_name == "argument":
        names = f"`{_argument(parameter)}`"
    elif not getattr(parameter, "is_flag", False):
        names += f" {parameter.metavar or parameter.name.rpartition('_')[2].upper()}".replace("|", "\\|")
    shown = parameter.show_default if isinstance(parameter.show_default, str) else None
    value = parameter.default
    default = "required" if parameter.required else shown or (f"`{value}`" if value is not None else "-")
    text = " ".join((parameter.help or "").split())
    if variable := getattr(parameter, "envvar", None):
        text += f" Left out, `{variable}` of the environment sets it."
    return f"| {names} | {default} | {text} |"


def rest() -> str:
    """Render the page about the control plane's requests."""
    with tempfile.TemporaryDirectory() as directory, closing(Runs(Path(directory))) as runs:
        described = create_app(runs).openapi()
    schemas = described["components"]["schemas"]
    requests = "\n".join(
        _request(method.upper(), path, operation)
        for path, ways in described["paths"].items()
        for method, operation in ways.items()
    )
    answered = {name: schema for name, schema in schemas.items() if _is_answer(name)}
    errors = "\n".join(_object(name, schemas[name]) for name in ERRORS)
    others = {"RunStatus": schemas["RunSummary"]["properties"]}
    objects = "\n".join(_object(name, schema, others.get(name, ())) for name, schema in answered.items())
    return REST.format(make=MAKE, requests=requests, errors=errors, objects=objects.rstrip() + "\n")


ERRORS = ("Problem", "FieldError")
ERROR = "[Problem](#problem)"
ANY_ERRORS = ("400", "401", "403", "422", "429")
"""Statuses that any request may have, which the page's head names."""


def _is_answer(name: str) -> bool:
    return name not in (*ERRORS, "DataSource") and not name.endswith(("Spec", "LossConfig"))


def _request(method: str, path: str, operation: dict[str, Any]) -> str:
    text = " ".join((operation.get("description") or operation["summary"]).split())
    lines = [f"## {method} {path}", "", text, ""]
    rows = [
        f"- `{p['name']}` ({p['in']}): {_schema_in_words(p['schema'])}{_json_default(p['schema'])}. "
        f"{p.get('description', '')}".rstrip()
        for p in operation.get("parameters", ())
        if p["in"] != "path"
    ]
    if body := operation.get("requestBody"):
        (content,) = body["content"].values()
        rows.insert(0, f"- the body: {_schema_in_words(content['schema'])} as JSON")
    if rows:
        lines += [*rows, ""]
    lines += ["```sh", _curl(method, path, operation), "```", ""]
    answers = [
        f"{status} {_answer(answer)}".strip()
        for status, answer in sorted(operation["responses"].items())
        if status not in ANY_ERRORS
    ]
    lines += [f"Answers: {', '.join(answers)}."]
    return "\n".join([*lines, ""])


def _curl(method: str, path: str, operation: dict[str, Any]) -> str:
    """Return a request as a command, with the first example of its body."""
    words = ["curl"]
    if "Needs no token" not in operation.get("description", ""):
        words.append('-H "$AUTH"')
    if method != "GET":
        words.append(f"-X {method}")
    if body := operation.get("requestBody"):
        (kind,), (content,) = body["content"], body["content"].values()
        example = next(iter(content["examples"].values()))["value"]
        words.append(f"-H 'Content-Type: {kind}' -d '{json.dumps(example)}'")
    return " ".join([*words, "http://127.0.0.1:8400" + path.format_map(EXAMPLES)])


EXAMPLES = {"run_id": "first-5f0e9c1a", "path": "model/config.json"}
"""Values of the parameters in a request's path."""


def _answer(answer: dict[str, Any]) -> str:
    """Return the object or type that a response carries; nothing for an error, which is always the same."""
    carried = []
    for kind, content in answer.get("content", {}).items():
        schema = content.get("schema", {})
        carried.append(_schema_in_words(schema) if "$ref" in schema else f"`{kind}`")
    text = " or ".join(carried)
    return "" if text == ERROR else text


def _object(name: str, schema: dict[str, Any], known: Collection[str] = ()) -> str:
    """Describe one object's fields, but those that another has."""
    text = " ".join(schema.get("description", "").split())
    lines = [f"### {name}", "", *([text, ""] if text else [])]
    if "enum" in schema:
        return "\n".join([*lines, "One of " + ", ".join(f'`"{value}"`' for value in schema["enum"]) + ".", ""])
    rows = [
        f"- `{field}`: {_schema_in_words(part)}. {' '.join(part.get('description', '').split())}".rstrip()
        for field, part in schema.get("properties", {}).items()
        if field not in known
    ]
    lines += ["Has the fields of [RunSummary](#runsummary), and:", ""] if known else []
    return "\n".join([*lines, *rows, ""])


def _schema_in_words(schema: dict[str, Any]) -> str:
    """Describe a JSON schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if _is_answer(name) or name in ERRORS else f"`{name}`"
    if alternatives := schema.get("anyOf"):
        return " or ".join(_schema_in_words(part) for part in alternatives)
    if schema.get("type") == "array":
        return f"list of {_schema_in_words(schema.get('items', {}))}"
    if "const" in schema or "enum" in schema:
        return " or ".join(f'`"{value}"`' for value in schema.get("enum", [schema.get("const")]))
    bounds = [f"{sign} {schema[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in schema]
    bounds = ["≤ 2^62" if bound == f"≤ {2**62}" else bound for bound in bounds]
    return " ".join([schema.get("type", "anything"), ", ".join(bounds)]).rstrip()


def _json_default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None or default in ("", []) else f", by default `{str(default).lower()}`"


def python() -> str:
    """Render the page about whole runs from Python: functions with their arguments, classes with their members."""
    sections = []
    things = (
        xtoken.distill,
        xtoken.dry_run,
        xtoken.DistillResult,
        xtoken.RunCallback,
        xtoken.TokenizerPair,
        Distillation,
    )
    for thing in things:
        module = "xtoken.integrations" if thing is Distillation else "xtoken"
        text, parts = _docstring(thing)
        signature = inspect.signature(thing).parameters
        lines = [f"- `{_parameter(signature, part)}`: {says}" for part, says in parts.items() if says != "See there."]
        members = vars(thing).items() if inspect.isclass(thing) and thing is not Distillation else ()
        for member, method in members:
            if inspect.isfunction(method) and not member.startswith("_"):
                arguments = ", ".join([*inspect.signature(method).parameters][1:])
                lines.append(f"- `{member}({arguments})`: {_docstring(method)[0]}")
        sections.append("\n".join([f"## {module}.{thing.__name__}", "", text, "", *lines, ""]))
    return PYTHON.format(make=MAKE, sections="\n".join(sections).rstrip())


def _docstring(thing: Any) -> tuple[str, dict[str, str]]:
    """Return a docstring's first paragraphs, and what it says of arguments, attributes, result and errors by name."""
    head, *rest = re.split(r"^(Args|Attributes|Returns|Raises):\n", inspect.getdoc(thing) or "", flags=re.MULTILINE)
    parts = {}
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        named = re.findall(r"^    ([*\w]+): ((?:.|\n(?! {4}\S))+)", body, re.MULTILINE)
        for name, says in [("returns", body)] if title == "Returns" else named:
            parts[f"raises {name}" if title == "Raises" else name] = " ".join(says.split())
    return " ".join(head.split()), parts


def _parameter(signature: Mapping[str, inspect.Parameter], name: str) -> str:
    """Return an argument with its default."""
    default = signature[name].default if name in signature else inspect.Parameter.empty
    return name if default is inspect.Parameter.empty else f"{name}={default!r}"


PAGES = {"configuration.md": configuration, "cli.md": cli, "rest.md": rest, "python.md": python}


def out_of_step() -> list[str]:
    """Return the pages that say something else than the code."""
    return [name for name, make in PAGES.items() if not _same(DOCS / name, make())]


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main() -> int:
    """Write the pages, or with `--check` compare them."""
    if sys.argv[1:] == ["--check"]:
        stale = out_of_step()
        sys.stderr.write("".join(f"docs/{name} is out of step: run {MAKE}\n" for name in stale))
        return int(bool(stale))
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
