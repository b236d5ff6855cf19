"""The texts of experiments/real, on hand-made pages."""

from __future__ import annotations

from experiments.real.texts import Page, documents, split_of


def test_documents_hold_every_paragraph_once_and_in_order() -> None:
    paragraphs = [f"{number} " + "wort " * 60 for number in range(20)]
    joined = "\n\n".join(documents(Page("p", paragraphs)))
    assert [text for text in paragraphs if text in joined] == paragraphs
    assert joined.count("wort") == 20 * 60


def test_every_split_has_its_fraction_of_the_pages() -> None:
    splits = [split_of(f"page-{number}.html") for number in range(2000)]
    for name, fraction in (("train", 0.8), ("validation", 0.1), ("test", 0.1)):
        assert abs(splits.count(name) / 2000 - fraction) < 0.03
