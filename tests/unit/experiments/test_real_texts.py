"""The texts of experiments/real, on hand-made pages."""

import json
import zipfile
from pathlib import Path

import pytest

from experiments.real import texts
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


def test_packages_are_held_out_whole_and_without_their_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"train": ("one==1", "two==1"), "validation": ("three==1",), "test": ("four==1",)}
    monkeypatch.setattr(texts, "PYTHON_PACKAGES", packages)
    for package in (name for names in packages.values() for name in names):
        (folder := tmp_path / "packages" / package).mkdir(parents=True)
        with zipfile.ZipFile(folder / "it.whl", "w") as wheel:
            for file in ("a.py", "b.py", "tests/c.py", "d.txt"):
                wheel.writestr(f"it/{file}", f"# {package} {file}\n\n" + "x = 1\n" * 60)
    files = {split: tmp_path / f"{split}.jsonl" for split in packages}
    texts._write(texts._package_sources(tmp_path), files, texts.PACKAGE_BYTES)
    found = {split: [json.loads(line)["text"] for line in file.open()] for split, file in files.items()}
    for split, names in packages.items():
        heads = sorted(text.partition("\n")[0] for text in found[split])
        assert heads == sorted(f"# {name} {file}" for name in names for file in ("a.py", "b.py"))
