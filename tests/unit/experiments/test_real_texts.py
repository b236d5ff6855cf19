"""The texts of experiments/real, on hand-made pages."""

from __future__ import annotations

import pytest

from experiments.real.texts import Page, documents, html_paragraphs, is_in, roff_paragraphs, split_of

PAGE = """<html><head><title>T</title></head><body><div class="section"><h2>Head</h2><div class="para">
  Der <code>apt</code> Befehl &amp; mehr<div class="note"><div class="para">Inner.</div></div>
 und weiter</div><pre>code</pre></div></body></html>"""

MANUAL = r""".\" a comment
.TH APT 8
.SH BESCHREIBUNG
\fBapt\fP ist ein
.B Werkzeug
für \-\-all.
.PP
Zweiter Absatz.
"""


def test_paragraphs_of_a_page() -> None:
    assert html_paragraphs(PAGE) == ["Der apt Befehl & mehr", "Inner.", "und weiter"]


def test_paragraphs_of_a_manual_page() -> None:
    assert roff_paragraphs(MANUAL) == ["apt ist ein Werkzeug für --all.", "Zweiter Absatz."]


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("de", "Die Datei ist nicht auf dem Rechner", True),
        ("en", "The file is not on the machine", True),
        ("fr", "Le fichier est dans la machine et pas sur le disque", True),
        ("de", "The file is not on the machine", False),
        ("de", "apt-get install foo bar baz", False),
    ],
)
def test_language_of_a_paragraph(language: str, text: str, expected: bool) -> None:
    assert is_in(language, text) is expected


def test_documents_hold_every_paragraph_once_and_in_order() -> None:
    paragraphs = [f"{number} " + "wort " * 60 for number in range(20)]
    joined = "\n\n".join(documents(Page("p", paragraphs)))
    assert [text for text in paragraphs if text in joined] == paragraphs
    assert joined.count("wort") == 20 * 60


def test_a_short_rest_is_left_out() -> None:
    assert list(documents(Page("p", ["kurz"]))) == []


def test_every_split_has_its_fraction_of_the_pages() -> None:
    splits = [split_of(f"page-{number}.html") for number in range(2000)]
    for name, fraction in (("train", 0.8), ("validation", 0.1), ("test", 0.1)):
        assert abs(splits.count(name) / 2000 - fraction) < 0.03
