"""Inputs of both sides of the comparison: models with random weights, tokenizers, text, a projection."""

from __future__ import annotations

import json
import random
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.lengths import Lengths
from xtoken_core.atomic import atomic_write
from xtoken_core.projection import build_projection, write_projection

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _shape(model_type: str, *sizes: int, head_dim: int, vocab_size: int, **more: Any) -> dict[str, Any]:
    """Return a configuration of `SIZES` and a width of heads."""
    named = dict(zip(SIZES, sizes, strict=True))
    return {"model_type": model_type, **named, "head_dim": head_dim, "vocab_size": vocab_size, **more}


LLAMA_1B = _shape("llama", 2048, 8192, 16, 32, 8, head_dim=64, vocab_size=128256, rope_theta=500000.0)
QWEN3_4B = _shape("qwen3", 2560, 9728, 36, 32, 8, head_dim=128, vocab_size=151936, rope_theta=1000000.0)
SMOLLM2_135M = _shape("llama", 576, 1536, 30, 9, 3, head_dim=64, vocab_size=49152, rope_theta=100000.0)
WINDOWS = {"query_pre_attn_scalar": 256, "sliding_window": 512}
GEMMA3_270M = _shape("gemma3_text", 640, 2048, 18, 4, 1, head_dim=256, vocab_size=262144, **WINDOWS)
COMMON: dict[str, Any] = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
SMALL = {**dict(zip(SIZES, (64, 128, 2, 4, 2), strict=True)), "head_dim": 16}
"""Replaces the shapes above where only the harness is tried; the heads stay as wide as the tokenizers need."""
TEACHER_MERGES = 150_000
STUDENT_ALONE = 20_000
"""Of the student's tokens, those that the teacher has not."""
CHARACTERS_PER_TOKEN = 16
"""Characters in which a document's tokens are certainly found."""
TEACHER_PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
"""Words in one piece whatever their case, digits one by one: not how the student's vocabulary was cut."""


@dataclass(frozen=True)
class Pair:
    """Shapes of a student and a teacher.

    Attributes:
        student: Its configuration.
        teacher: Likewise.
        merges: Tokens of the student's tokenizer.
    """

    student: dict[str, Any]
    teacher: dict[str, Any]
    merges: int

    @property
    def vocabularies(self) -> dict[str, int]:
        """Tokens of both tokenizers, and of those that they share."""
        return {"student": self.merges, "teacher": TEACHER_MERGES, "shared": self.merges - STUDENT_ALONE}


PAIRS = {"": Pair(LLAMA_1B, QWEN3_4B, 128_000), "135m_270m": Pair(SMOLLM2_135M, GEMMA3_270M, 48_000)}
"""Models by the name of their directory below the work directory; the first pair is in it."""


@dataclass(frozen=True)
class Assets:
    """Directories and files.

    Attributes:
        student: Tokenizer and weights.
        teacher: Likewise.
        projection: From the student's vocabulary to the teacher's.
        text: One record per document, each longer than the context on both sides.
    """

    student: Path
    teacher: Path
    projection: Path
    text: Path


def assets_of(directory: Path) -> Assets:
    """Return the assets below a directory, made or not."""
    names = "student", "teacher", "projection.safetensors", "text.jsonl"
    return Assets(*(directory / name for name in names))


def make_tokenizers(directory: Path, pair: Pair = PAIRS[""]) -> None:
    """Write `student/` and `teacher/` with byte-level vocabularies (mistral-common's).

    Of the first pair they have 128,000 and 150,000 tokens and share 108,000, about as many as Llama 3 and Qwen 3 do.
    """
    from tests.support.vocabularies import tekken

    tekken(pair.merges, joined=STUDENT_ALONE).save_pretrained(directory / "student")
    tekken(TEACHER_MERGES, pattern=TEACHER_PATTERN).save_pretrained(directory / "teacher")


def make_assets(
    directory: Path,
    *,
    small: bool,
    documents: int,
    characters: int,
    layers: int | None = None,
    pair: str = "",
    projected: bool = True,
) -> Assets:
    """Make everything that a comparison reads, once per directory.

    Args:
        directory: Holds `student/` and `teacher/` with their tokenizers already, or gets them.
        small: Two thin layers in place of the real shapes.
        documents: Records of text.
        characters: Of each.
        layers: Of both models, if not as many as the real ones have.
        pair: Which models, by their key in `PAIRS`.
        projected: Make the projection too.
    """
    models, directory = PAIRS[pair], directory / pair
    assets = assets_of(directory)
    if not (assets.student / "tokenizer.json").exists():
        make_tokenizers(directory, models)
    shapes = {assets.student: models.student, assets.teacher: models.teacher}
    for seed, (place, shape) in enumerate(shapes.items()):
        if not (place / "config.json").exists():
            cut = {"num_hidden_layers": layers} if layers else {}
            make_model(place, {**COMMON, **shape, **(SMALL if small else {}), **cut}, seed)
    if projected and not assets.projection.exists():
        tokenizers = [AutoTokenizer.from_pretrained(place) for place in (assets.student, assets.teacher)]
        rows = models.student["vocab_size"]
        write_projection(build_projection(*tokenizers, student_rows=rows), assets.projection)
    _write_text(assets.text, documents, characters)
    return assets


def with_lengths(assets: Assets, lengths: Lengths, *, documents: int, seed: int) -> Assets:
    """Return the assets with documents whose lengths, in the student's tokens, are drawn from a distribution.

    Args:
        assets: Models and tokenizers.
        lengths: The distribution; its context counts the tokens that open and close a document too.
        documents: Records of text.
        seed: Of the lengths.
    """
    name = f"text-{lengths.median}-{lengths.context}-{documents}-{seed}.jsonl"
    made = replace(assets, text=assets.text.with_name(name))
    if made.text.exists():
        return made
    tokenizer = AutoTokenizer.from_pretrained(assets.student)
    source, start = _source(documents * lengths.context * 2), 0
    records = []
    for count in lengths.draw(random.Random(seed), documents):
        stretch = source[start : start + CHARACTERS_PER_TOKEN * count]
        offsets = tokenizer(stretch, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        text = stretch[: offsets[min(count, len(offsets)) - 1][1]]
        records.append(json.dumps({"text": text}))
        start += len(text)
    atomic_write(made.text, "\n".join(records) + "\n")
    return made


def make_model(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Write a model with random weights in bfloat16, drawn on a GPU where there is one: a CPU takes minutes."""
    torch.manual_seed(seed)
    values = dict(config)
    found = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(found, dtype=torch.bfloat16).save_pretrained(directory)


def _write_text(path: Path, documents: int, characters: int) -> None:
    """Write stretches of the standard library's sources, again from the start where they end."""
    source = _source(documents * characters)
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            text = source[number * characters : (number + 1) * characters]
            file.write(json.dumps({"text": text}) + "\n")


def _source(characters: int) -> str:
    """Return the standard library's sources, repeated up to at least so many characters."""
    library = Path(sysconfig.get_paths()["stdlib"])
    source = "".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(library.glob("*.py")))
    while len(source) < characters:
        source += source
    return source
