"""Generated pages are in step with result files, and their comparisons are computed from them."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks import pages
from experiments.real import page as real_models

WRITERS: dict[str, tuple[Callable[[], dict[Path, str]], set[Path]]] = {
    "benchmarks.pages": (cache(pages.rendered), {part.page for part in pages.PARTS}),
    "experiments.real.page": (cache(real_models.rendered), {*real_models.PAGES.values(), *real_models.PICTURES}),
}


@pytest.mark.parametrize(
    ("module", "page"),
    [
        pytest.param(m, p, id=f"{m}: {p.relative_to(pages.ROOT)}")
        for m, (_, files) in WRITERS.items()
        for p in sorted(files)
    ],
)
def test_a_page_is_in_step_with_the_results(module: str, page: Path) -> None:
    assert WRITERS[module][0]()[page] == page.read_text(encoding="utf-8"), f"run: python -m {module}"


def comparison_rows() -> list[list[str]]:
    """Return the cells of the README's table."""
    (part,) = (part for part in pages.PARTS if part.name == "comparison")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.text().splitlines()[2:]]


def test_the_readme_compares_a_whole_run_like_for_like_first() -> None:
    result = pages.result("end_to_end")
    like, public = (row for row in comparison_rows() if row[0].startswith("whole run"))
    assert "one sample at a time on both sides" in like[0]
    assert "not like for like" in public[0]
    single, gold = (result["variants"][name] for name in ("p_kl_hidden", "gold_wide"))
    assert (single["wide"], gold["wide"]) == (False, True)
    serial = result["serial"]
    for row, variant, loop in ((like, single, single["serial"]), (public, gold, "gold public")):
        assert float(row[3]) == pytest.approx(
            variant["tokens_per_second"] / serial[loop]["tokens_per_second"], abs=0.05
        )
    assert float(like[3]) < float(public[3])


def test_every_comparison_names_a_target() -> None:
    targets = (pages.ROOT / "Makefile").read_text(encoding="utf-8")
    for row in comparison_rows():
        command = re.fullmatch(r"`make ([\w-]+)`", row[4])
        assert f"\n{command[1]}:" in targets


def test_a_part_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        pages.PARTS[0].inserted("no marks here")
