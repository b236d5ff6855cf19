"""Measure the losses' values and gradients for several k: `python -m experiments.topk_teacher`.

    --student DIR --teacher DIR    Hugging Face directories of two models with different tokenizers
    --text FILE                    documents (.jsonl with the field `text`); the first --documents are read

Nothing is trained; the student may be a run's model (`--steps` and another `--out` then). A gradient is that of the
student's last hidden states, all positions of all documents as one vector; its cosine is that with the gradient from
the teacher's whole logits. The tables of the two tokenizers are built by the first call, and kept in the user's cache.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.digits.stages import machine
from xtoken_core import schema
from xtoken_core.atomic import atomic_write
from xtoken_core.config.spec import RunSpec
from xtoken_core.losses.masks import predicted_ids
from xtoken_core.topk_logits import largest_logits
from xtoken_core.transports.ring import TopKSettings
from xtoken_services.common.models.loading import load_model
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.text.training_text import open_index
from xtoken_services.common.tokenizers.loading import load_tokenizer
from xtoken_services.trainer.eval_loss import EvalLoss, on_device
from xtoken_services.trainer.main import make_loss

RESULT = Path(__file__).with_name("results") / "topk_teacher.json"
SIZES = (16, 64, 256)
MODES: dict[str, dict[str, Any]] = {
    "p_kl": {"mode": "p_kl", "vocab_topk": None},
    "alm": {"mode": "alm"},
    "chain": {"mode": "chain", "kl_loss_weight_end": "none"},
}
LEAST_MASSES = (0.0, 0.5)
"""Values of `chain_least_mass` that are tried."""


PARTS = {"start_ratio": "chain_start_t0", "inner_ratio": "chain_inner_t0", "end_ratio": "chain_end_t0"}
"""Parts of chain by their name in the result, where each is a ratio to that of whole logits."""


@dataclass
class Sums:
    """Sums over batches of one variant, beside those of the whole logits.

    Attributes:
        value: The loss.
        mass: The metric `chunk_mass_t0`.
        square: Squared norm of the gradient.
        product: Its product with the gradient from whole logits.
        parts: The metrics `chain_start_t0`, `chain_inner_t0` and `chain_end_t0`, by name; empty for other losses.
    """

    value: float = 0.0
    mass: float = 0.0
    square: float = 0.0
    product: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, value: float, metrics: Mapping[str, float], gradient: Tensor, whole: Tensor) -> None:
        """Add a batch."""
        self.value, self.mass = self.value + value, self.mass + metrics.get("chunk_mass_t0", 1.0)
        for name in PARTS.values():
            if name in metrics:
                self.parts[name] = self.parts.get(name, 0.0) + metrics[name]
        self.square += float(gradient.double().square().sum())
        self.product += float((gradient.double() * whole.double()).sum())


@dataclass
class Mode:
    """Sums of one loss by variant.

    Attributes:
        whole: From the teacher's whole logits.
        variants: From its largest, by name.
    """

    whole: Sums = field(default_factory=Sums)
    variants: dict[str, Sums] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return the values, and of each variant its ratio to the whole and the gradients' cosine and norm ratio."""
        rows = {}
        for name, sums in self.variants.items():
            norms = math.sqrt(sums.square), math.sqrt(self.whole.square)
            rows[name] = {
                "value_ratio": sums.value / self.whole.value,
                "cosine": sums.product / (norms[0] * norms[1]),
                "norm_ratio": norms[0] / norms[1],
                "mass": sums.mass,
            }
            whole = self.whole.parts
            rows[name] |= {
                part: sums.parts[metric] / whole[metric] for part, metric in PARTS.items() if metric in whole
            }
        return {"value": self.whole.value, "variants": rows}


def variants_of(mode: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield name, k and further settings of every variant of a loss."""
    for k in SIZES:
        if mode != "chain":
            yield f"k={k}", k, {}
            continue
        for least in LEAST_MASSES:
            yield f"k={k}, least={least:g}", k, {"chain_least_mass": least}


def spec_of(arguments: argparse.Namespace, output: Path, loss: Mapping[str, Any]) -> RunSpec:
    """Return a run whose loss is measured."""
    length = arguments.context_length
    return RunSpec.model_validate(
        {
            "output": output,
            "student": {"model": arguments.student, "context_length": length},
            "teacher": [
                {
                    "model": arguments.teacher,
                    "context_length": length,
                    "content": "topk",
                    "projection": arguments.projection if loss["mode"] == "p_kl" else None,
                }
            ],
            "data": {"path": arguments.text},
            "eval": {"path": arguments.text, "kl_documents": arguments.documents},
            "train": {"micro_batch_tokens": length, "packing": "off"},
            "loss": {**loss, "ce_loss_scale": 0.0},
            "workers": {"device": arguments.device},
        }
    )


def measure(arguments: argparse.Namespace, mode: str, output: Path) -> dict[str, Any]:
    """Measure one loss."""
    run, device = resolve_run(spec_of(arguments, output, MODES[mode])), torch.device(arguments.device)
    tokenizer = load_tokenizer(run.spec.student.tokenizer_dir, "student")
    losses = {}
    for name, k, changes in variants_of(mode):
        spec = spec_of(arguments, output, {**MODES[mode], **changes})
        losses[name] = (k, make_loss(run.model_copy(update={"spec": spec}), device))
    whole = make_loss(run, device)
    documents = open_index(run.spec, run.spec.data.paths, run.spec.data.field).documents()
    held_out = EvalLoss(run, whole, tokenizer, documents)
    student = load_model(run.spec.student, "student", device).eval()  # type: ignore[no-untyped-call]
    teacher = load_model(run.spec.teacher[0], "teacher 0", device).eval()  # type: ignore[no-untyped-call]
    head = student.get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    sums = Mode()
    for number, batch in enumerate(held_out.batches):
        tensors = on_device(batch.data, device)
        ids = tensors[schema.field_name(schema.TEACHER_INPUT_IDS, 0)]
        with torch.no_grad():
            logits = student(input_ids=tensors[schema.INPUT_IDS.name], use_cache=False).logits
            given = teacher(input_ids=ids, use_cache=False).logits

        def evaluated(loss: Any, signal: Any, columns: dict[str, Tensor] = tensors, z: Tensor = logits) -> Any:
            leaf = z.clone().requires_grad_()
            value, metrics = loss(
                columns, leaf, [signal], global_valid_toks=held_out.tokens, global_valid_chunks=held_out.chunks
            )
            value.backward()
            named = {name: float(metrics[name]) for name in ("chunk_mass_t0", *PARTS.values()) if name in metrics}
            return float(value.detach()), named, leaf.grad[0] @ head

        value, parts, reference = evaluated(whole, given)
        sums.whole.add(value, parts, reference, reference)
        selected = {
            k: largest_logits(given, predicted_ids(ids), TopKSettings(k, run.teachers[0].vocab_size)) for k in SIZES
        }
        for name, (k, loss) in losses.items():
            value, parts, gradient = evaluated(loss, selected[k])
            sums.variants.setdefault(name, Sums()).add(value, parts, gradient, reference)
        print(f"{mode}: document {number + 1} of {len(held_out.batches)}", flush=True)
    chunks, tokens = held_out.chunks[0], held_out.tokens
    return {"chunks": chunks, "tokens": tokens, **sums.summary()}


def main() -> None:
    """Measure every loss and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--projection", type=Path, help="of P-KL; left out: it is built")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, help="that the student was trained for before, for the page")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="others stay as measured before")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as output:
        measured = {mode: measure(arguments, mode, Path(output)) for mode in arguments.modes}
    earlier = json.loads(arguments.out.read_text(encoding="utf-8"))["modes"] if arguments.out.exists() else {}
    modes = {mode: (earlier | measured)[mode] for mode in MODES if mode in earlier | measured}
    result = {
        "student": arguments.student.name,
        "teacher": arguments.teacher.name,
        "text": arguments.text.name,
        "documents": arguments.documents,
        "context_length": arguments.context_length,
        "device": arguments.device,
        "steps": arguments.steps,
        "modes": modes,
        "machine": machine(),
        "seconds": round(time.monotonic() - began, 1),
    }
    atomic_write(arguments.out, json.dumps(result, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
