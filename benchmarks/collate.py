"""Alignment, collation and projection on one core: `python -m benchmarks.collate` (or `make bench-collate`).

Everything that is compared runs side by side in one process, turn by turn (alignment three times as many); figures are
medians, ratios are medians of the turns' ratios. Alignment stands beside the offset walk of TRL's GOLD trainer, on the
same tokens. The vocabularies are those that mistral-common carries: tekken (byte-level, 130,076 tokens), its first
32,000 merges, and a SentencePiece model (32,000). English is Python's language reference, code the standard library,
multilingual text is sampled from sentences in twelve scripts.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from benchmarks.harness import command_line, host, in_process, write_result
from tests.support import vocabularies
from xtoken_core.alignment import TokenAligner, TokenTable
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config.loss import LossConfig
from xtoken_core.losses.masks import loss_counts
from xtoken_core.projection import build_projection, write_projection

CAPS = (512, 2048, 8192)
BATCH = 8
ALIGN_TURN_S = 0.02
Offsets = tuple[int, int]
_BEGAN = time.perf_counter()


def corpora() -> dict[str, str]:
    """Return English, code and multilingual text, about 3 MB each."""
    library = Path(sysconfig.get_paths()["stdlib"])
    from pydoc_data.topics import topics

    code = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(library.glob("*.py")))
    choose = random.Random(0)
    sentences = [line for text in vocabularies.TEXTS.values() for line in text.splitlines(keepends=True)]
    multilingual = " ".join(choose.choice(sentences) for _ in range(60_000))
    english = "\n\n".join(topics[name] for name in sorted(topics))
    return {"english": english * 5, "code": code, "multilingual": multilingual}


def documents(text: str, tokenizer: Any, cap: int, count: int = BATCH) -> list[str]:
    """Return `count` stretches of a text that fill the cap with either tokenizer."""
    per_token = len(text[:200_000]) / len(tokenizer.encode(text[:200_000]))
    size = int(cap * per_token * 1.6)
    step = max((len(text) - size) // count, 1)
    return [text[i * step : i * step + size] for i in range(count)]


def interleaved(turns: int, *actions: Callable[[], Any], at_least: float = 0.0) -> list[list[float]]:
    """Measure CPU seconds of this process for every action, by turns: on a free core, those of the wall clock.

    In a turn an action is repeated until it has taken `at_least` seconds, so that the clock's grain does not count.
    """
    times: list[list[float]] = [[] for _ in actions]
    for action in actions:
        action()
    for _ in range(turns):
        for action, taken in zip(actions, times, strict=True):
            began, calls, spent = time.process_time(), 0, -1.0
            while spent < at_least:
                action()
                calls, spent = calls + 1, time.process_time() - began
            taken.append(spent / calls)
    return times


def offset_walk() -> Callable[[list[Offsets], list[Offsets]], Any]:
    """Align one sample as TRL does: two pointers over byte offsets, in Python."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from trl.experimental.gold.gold_trainer import ULDLoss
    except ImportError as error:
        raise SystemExit(f"{error}: this benchmark compares with TRL: pip install -e '.[bench]'") from error
    walk: Callable[[list[Offsets], list[Offsets]], Any] = ULDLoss._align_by_byte_offsets
    return walk


def byte_offsets(table: TokenTable, ids: np.ndarray, text: str) -> list[Offsets]:
    """Return each token's offsets in its text, as TRL takes them; a space put before the text has none.

    Raises:
        ValueError: The tokens do not spell the text.
    """
    lengths, source, spelled = table.pool.lengths[ids], text.encode(), table.spell(ids)
    if not source.startswith(spelled):
        if not (b" " + source).startswith(spelled):
            raise ValueError(f"the tokens spell {spelled[:40]!r}, the text begins with {source[:40]!r}")
        lengths[(lengths > 0).argmax()] -= 1
    ends = np.cumsum(lengths)
    return list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))


def align_only(name: str, student: Any, teacher: Any, texts: dict[str, str], turns: int) -> list[dict[str, Any]]:
    """Measure the alignment alone: ids in, chunks out."""
    aligner, walk_row = TokenAligner(student, teacher), offset_walk()
    rows = []
    for corpus, text in texts.items():
        for cap in CAPS:
            batch = documents(text, student, cap)
            s, t = ([tokenizer.encode(document)[:cap] for document in batch] for tokenizer in (student, teacher))
            s_ids, t_ids = (torch.tensor(_equal(x)) for x in (s, t))
            s_mask, t_mask = torch.ones_like(s_ids), torch.ones_like(t_ids)
            offsets = [
                [byte_offsets(table, row, document) for row, document in zip(ids.numpy(), batch, strict=True)]
                for table, ids in ((aligner.student, s_ids), (aligner.teacher, t_ids))
            ]

            def ours(ids=(s_ids, t_ids), masks=(s_mask, t_mask)) -> Any:
                return aligner.align(*ids, student_attention_mask=masks[0], teacher_attention_mask=masks[1])

            def walk(offsets=offsets) -> None:
                for a, b in zip(*offsets, strict=True):
                    walk_row(a, b)

            mine, walked = interleaved(3 * turns, ours, walk, at_least=ALIGN_TURN_S)
            found = ours()
            rows.append(
                {
                    "pair": name,
                    "corpus": corpus,
                    "cap": cap,
                    "student_tokens_per_s": s_ids.numel() / statistics.median(mine),
                    "best": s_ids.numel() / min(mine),
                    "trl_tokens_per_s": s_ids.numel() / statistics.median(walked),
                    "times_offset_walk": statistics.median(w / m for w, m in zip(walked, mine, strict=True)),
                    "equal_chunks": bool(torch.equal(found.pair_is_correct, found.pair_valid)),
                }
            )
            _print_row(
                rows[-1], f"{rows[-1]['student_tokens_per_s'] / 1e6:.1f} M/s, {rows[-1]['times_offset_walk']:.0f} x TRL"
            )
    return rows


def whole_collator(name: str, student: Any, teacher: Any, texts: dict[str, str], turns: int) -> list[dict[str, Any]]:
    """Measure records in, rows for the queue out, against tokenizing with both and nothing else."""
    aligner = TokenAligner(student, teacher)
    counts = loss_counts(LossConfig(mode="p_kl"), [False])
    rows = []
    for corpus, text in texts.items():
        for cap in CAPS:
            batch = documents(text, student, cap, max(BATCH * 512 // cap, 2))
            records = [{"text": document} for document in batch]
            collator = CrossTokenizerCollator(
                student_tokenizer=student,
                teacher_tokenizer=teacher,
                aligner=aligner,
                ctx_length_student=cap,
                ctx_length_teacher=cap,
            )

            def tokenize(batch=batch, cap=cap) -> None:
                for tokenizer in (student, teacher):
                    tokenizer(batch, truncation=True, max_length=cap)

            def collate(collator=collator, records=records) -> Any:
                return collator.rows(records, counts)

            plain, whole = interleaved(turns, tokenize, collate)
            tokens = sum(collate().columns["input_lengths"].values.cast("q"))
            rows.append(
                {
                    "pair": name,
                    "corpus": corpus,
                    "cap": cap,
                    "student_tokens_per_s": tokens / statistics.median(whole),
                    "rate_of_tokenizing": statistics.median(p / w for p, w in zip(plain, whole, strict=True)),
                }
            )
            _print_row(rows[-1], f"collated at {rows[-1]['rate_of_tokenizing']:.2f} of the rate of tokenizing")
    return rows


def projection() -> dict[str, Any]:
    """Measure vocabularies of 130,000 tokens, tokenizers loaded; built by two processes, which must write the same."""
    built = []
    for _ in range(2):
        built.append(in_process(built_projection))
        print(f"[{time.perf_counter() - _BEGAN:5.0f} s] projection: {built[-1]['seconds']:.2f} s", flush=True)
    hashes = {process["sha256"] for process in built}
    return {"seconds": max(p["seconds"] for p in built), "identical": len(hashes) == 1, "sha256": sorted(hashes)}


def built_projection() -> dict[str, Any]:
    """Return the projection that one process builds, and the hash of the file that it writes."""
    student, teacher = vocabularies.tekken(130000), vocabularies.mistral_tekken()
    began = time.process_time()
    built = build_projection(student, teacher)
    seconds = time.process_time() - began
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "projection.safetensors"
        write_projection(built, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"seconds": seconds, "sha256": digest}


def _print_row(row: dict[str, Any], what: str) -> None:
    print(f"[{time.perf_counter() - _BEGAN:5.0f} s] {row['pair']}, {row['corpus']}, {row['cap']}: {what}", flush=True)


def _equal(rows: list[list[int]]) -> list[list[int]]:
    width = min(map(len, rows))
    return [row[:width] for row in rows]


def main() -> None:
    """Run, print and keep the figures."""
    parser = command_line(__doc__, "collate")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = corpora()
    large, small, pieces = vocabularies.tekken(), vocabularies.tekken(32000), vocabularies.sentencepiece_bpe()
    pairs = {"tekken -> its first 32,000": (large, small), "tekken -> sentencepiece": (large, pieces)}
    align, collate = [], []
    for name, (student, teacher) in pairs.items():
        align += align_only(name, student, teacher, texts, options.turns)
        collate += whole_collator(name, student, teacher, texts, options.turns)
    built = projection()
    result = {
        "machine": host("numpy", "torch", "tokenizers", "transformers", "trl"),
        "settings": {"batch": BATCH, "turns": options.turns, "threads": 1, "seconds": time.perf_counter() - _BEGAN},
        "align": align,
        "collator": collate,
        "projection": built,
    }
    print(f"projection of two 130k vocabularies: {built['seconds']:.2f} s, identical {built['identical']}")
    write_result(options.out, result)


if __name__ == "__main__":
    main()
