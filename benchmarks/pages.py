"""Measured figures in the documents: result files rendered by Jinja templates, between marks in each page.

    python -m benchmarks.pages [--check]

Every part has a template in `benchmarks/templates` and a function that returns the template's variables. With `--check`
nothing is written; the exit status is 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import bounds, operators, real_pair, sizing_page
from benchmarks.end_to_end import labels
from benchmarks.end_to_end.labels import bounds_of
from benchmarks.on_policy import report as on_policy
from benchmarks.queue.bounds import queue_bounds

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TEMPLATES = ROOT / "benchmarks" / "templates"
PERFORMANCE = ROOT / "docs" / "performance.md"
OPERATORS = ROOT / "docs" / "operators"
ON_POLICY = ROOT / "docs" / "on_policy.md"


@dataclass(frozen=True)
class Part:
    """One generated part of a page.

    Attributes:
        name: Name of the template and of the marks.
        page: The document that holds the marks.
        variables: Returns the template's variables, read from result files.
    """

    name: str
    page: Path
    variables: Callable[[], dict[str, Any]]

    @property
    def marks(self) -> tuple[str, str]:
        """The comments before and after the part."""
        return f"<!-- {self.name}: written by benchmarks/pages.py -->", f"<!-- end of {self.name} -->"

    def text(self, **changed: Any) -> str:
        """Return the part without its marks; `changed` replaces variables."""
        return render(TEMPLATES / f"{self.name}.md.j2", **(self.variables() | changed)).strip()

    def inserted(self, page: str) -> str:
        """Return a page's text with this part renewed.

        Raises:
            ValueError: The page lacks a mark.
        """
        start, end = self.marks
        before, opened, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"{self.page} lacks the marks {start!r} and {end!r}: put both where the part belongs")
        return f"{before}{start}\n{self.text()}\n{end}{after}"


def result(name: str) -> dict[str, Any]:
    """Return the contents of `results/NAME.json`."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def render(template: Path, **variables: Any) -> str:
    """Return a rendered template; `x | f(".1f")` formats a number as Python's `format` does, `x | gpus` a machine."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    environment.filters |= {
        "off": lambda sums: sums[0] / sums[1] - 1,
        "f": format,
        "median": statistics.median,
        "span": span,
        "gpus": gpus,
    }
    return environment.get_template(template.name).render(**variables)


def span(values: list[float], form: str) -> str:
    """Return the lowest and the highest of some values."""
    return f"{min(values):{form}} to {max(values):{form}}"


def gpus(names: Iterable[str]) -> str:
    """Return the names of a machine's GPUs, equal ones as one; empty without a GPU.

    >>> gpus(["NVIDIA H200", "NVIDIA H200"]), gpus(["NVIDIA H200"]), gpus([])
    ('2 x NVIDIA H200', 'NVIDIA H200', '')
    """
    return " and ".join(name if count == 1 else f"{count} x {name}" for name, count in Counter(names).items())


def end_to_end_results() -> dict[str, dict[str, Any]]:
    """Return the result files of whole runs by name."""
    return {name: result(name) for name in labels.FILES}


def _bounds() -> dict[str, Any]:
    kills = result("worker_kills")
    return {
        "tables": {
            "The queue": queue_bounds(result("queue")),
            "Alignment, collation, projection": bounds.collation_bounds(result("collate"), result("collate_workers")),
            "Whole runs": [*bounds_of(end_to_end_results()), bounds.divided_bound(result("divided_teacher"))],
            "On-policy distillation": on_policy.bounds(result("on_policy")),
            "Kills and resume": [
                bounds.at_least("kills of teachers and trainers", sum(kills["summary"]["kills"].values()), 100),
                *bounds.kill_bounds(kills["summary"], kills["errors"]),
                *bounds.resume_bounds(result("resume")),
            ],
            "The control plane": bounds.control_bounds(result("control")),
        }
    }


def _fuzz_parsers() -> dict[str, Any]:
    names = {
        "frames": "messages, and the engine behind them", "columns": "columns", "journal": "write-ahead log",
        "index": "index of a model's weights", "run_file": "run file",
    }  # fmt: skip
    return {"r": result("fuzz_parsers"), "names": names}


def _load() -> dict[str, Any]:
    runs = [result("queue_runs"), result("queue_day")]
    return {"runs": runs, "kills": result("queue_kills"), "attack": result("attack")}


def _comparison() -> dict[str, Any]:
    aligned = result("collate")["align"]
    return {
        "end_to_end": result("end_to_end"),
        "aligned": [row["student_tokens_per_s"] / 1e6 for row in aligned],
        "walk": [row["times_offset_walk"] for row in aligned],
    }


def _operator(page: str) -> Callable[[], dict[str, Any]]:
    return lambda: operators.variables(page, result("gpu_tests"), result("ops"))


def _sizing_pairs() -> dict[str, Any]:
    strong = json.loads((ROOT / "experiments" / "real" / "results" / "strong.json").read_text(encoding="utf-8"))
    return {"r": strong, "rows": sizing_page.measured(strong), "GIB": 1 << 30}


SIZING: dict[str, Callable[[], dict[str, Any]]] = {
    "pairs": _sizing_pairs,
    "estimates": lambda: {**sizing_page.by_machine(result("sizing")), "GIB": 1 << 30},
    "paper": lambda: {"p": sizing_page.paper(), "GIB": 1 << 30},
}
PARTS = [
    Part("comparison", ROOT / "README.md", _comparison),
    Part("queue", PERFORMANCE, lambda: {"r": result("queue")}),
    Part("collation", PERFORMANCE, lambda: {"r": result("collate"), "workers": result("collate_workers")}),
    Part("end_to_end", PERFORMANCE, lambda: {"results": end_to_end_results(), "l": labels}),
    Part("on_policy", ON_POLICY, lambda: on_policy.variables(result("on_policy"))),
    Part("on_policy_problems", ON_POLICY, lambda: {"p": result("on_policy_problems")}),
    Part("rollouts", ON_POLICY, lambda: {"g": result("generation"), "kills": result("rollout_kills")}),
    Part("kills", PERFORMANCE, lambda: {"kills": result("worker_kills"), "resume": result("resume"), "MIB": 1 << 20}),
    Part("control", PERFORMANCE, lambda: {"r": result("control")}),
    Part("startup", PERFORMANCE, lambda: {"r": result("startup")}),
    Part("one_run", PERFORMANCE, lambda: {"r": result("one_run")}),
    *(Part(f"sizing_{name}", ROOT / "docs" / "sizing.md", of) for name, of in SIZING.items()),
    Part("real_pair", ROOT / "docs" / "operations.md", lambda: result("real_pair") | {"titles": real_pair.TITLES}),
    Part("ray_direct", ROOT / "docs" / "operations.md", lambda: {"r": result("ray_direct")}),
    Part("store", ROOT / "docs" / "operations.md", lambda: {"r": result("store")}),
    Part("engines", ROOT / "docs" / "operations.md", lambda: {"r": result("engines")}),
    Part("images", ROOT / "docs" / "operations.md", lambda: {"r": result("images")}),
    Part("fuzz_parsers", ROOT / "docs" / "operations.md", _fuzz_parsers),
    Part("load", ROOT / "docs" / "operations.md", _load),
    Part("bounds", PERFORMANCE, _bounds),
    Part(
        "hidden_states",
        OPERATORS / "hidden_states.md",
        lambda: operators.hidden_states(result("gpu_tests"), result("hidden_states")),
    ),
    Part("same_tokenizer", OPERATORS / "token_kl.md", lambda: {"r": result("same_tokenizer")}),
    Part("chain", OPERATORS / "chain.md", lambda: {"r": result("chain"), "forms": result("chain_forms")}),
    *(
        Part("operator", page, _operator(page.stem))
        for page in sorted(OPERATORS.glob("*.md"))
        if page.stem not in ("README", "hidden_states", "chain")
    ),
]


def rendered() -> dict[Path, str]:
    """Return every page that holds a part, with all its parts renewed."""
    pages: dict[Path, str] = {}
    for part in PARTS:
        pages[part.page] = part.inserted(pages.get(part.page) or part.page.read_text(encoding="utf-8"))
    return pages


def write(texts: Callable[[], Mapping[Path, str]], doc: str | None = __doc__) -> int:
    """Write files that have changed, or with `--check` only name them.

    Returns:
        The exit status: 1 where `--check` has found a file that is out of date.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check = parser.parse_args().check
    stale = {path: text for path, text in texts().items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if not check:
            path.write_text(text, encoding="utf-8")
    print(f"{'out of date' if check else 'written'}: {', '.join(path.name for path in stale) or 'none'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(write(rendered))
