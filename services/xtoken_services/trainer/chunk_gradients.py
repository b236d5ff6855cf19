"""Gradients of the divergence by class of chunk: their norms, and the cosines between them, on held-out text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.chunk_classes import CLASSES, class_members
from xtoken_core.losses.lazy_logits import Logits, as_tensor
from xtoken_core.losses.masks import next_token_targets, student_tokens
from xtoken_services.common.models.loading import pick_device
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.text.training_text import open_index
from xtoken_services.common.tokenizers.loading import tokenizer_of
from xtoken_services.trainer.eval_loss import EvalLoss, on_device
from xtoken_services.trainer.main import make_loss
from xtoken_services.trainer.student import load_student

CROSS_ENTROPY = "cross_entropy"


def measure_gradients(spec: RunSpec, *, custom_loss: str | None = None) -> dict[str, Any]:
    """Measure a run's student as it is before training; nothing is trained.

    One gradient of all weights per class is kept, in the weights' dtype.

    Args:
        spec: The run; its held-out text (`eval`) is read.
        custom_loss: `module:Class` of the mode `custom`.

    Returns:
        `documents`; `classes`: for each class of every teacher, and for the cross-entropy, `count`, the mean `value` in
        nats, the `norm` of the mean's gradient and its `norm_ratio` to the cross-entropy's; `cosine` between each two.

    Raises:
        ConfigError: The run has no held-out text.
        InputError: A file of the run cannot be read.
    """
    if spec.eval is None:
        raise ConfigError("the run file has no [eval]: gradients by class of chunk are measured on held-out text")
    spec = spec.model_copy(update={"loss": spec.loss.model_copy(update={"gradient_in_place": False})})
    assert spec.eval is not None
    run = resolve_run(spec)
    device = pick_device(spec.workers.device, 0)
    student = load_student(spec, device, ranks=1, packed=run.packed)
    tokenizer = tokenizer_of(spec.student, "student")
    loss = make_loss(run, device, custom_loss, tokenizer)
    held_out = EvalLoss(run, loss, tokenizer, open_index(spec, spec.eval.paths, spec.eval.field).documents())
    teachers = held_out.load_teachers(device)
    student.eval()
    weights = [weight for weight in student.model.parameters() if weight.requires_grad]
    gradients = Gradients(weights)
    for batch in held_out.batches:
        tensors = on_device(batch.data, device)
        row = batch.rows[0] if batch.rows else None
        logits = as_tensor(student.outputs(tensors[schema.INPUT_IDS.name], row))
        with torch.no_grad():
            signals = held_out.signals(teachers, tensors, batch.rows)
        for name, value, count in values_by_class(loss, tensors, logits, signals):
            gradients.add(name, value, count)
    documents = sum(len(batch.data[schema.SAMPLE_MASK.name]) for batch in held_out.batches)
    return {"documents": documents, **gradients.summary()}


def values_by_class(
    loss: CrossTokenizerDistillationLoss, batch: Mapping[str, Tensor], logits: Tensor, signals: Sequence[Logits]
) -> Iterator[tuple[str, Tensor, int]]:
    """Yield name, summed value and count of the cross-entropy and of every class that the batch has.

    Args:
        loss: The run's, with the kinds of the student's tokens.
        batch: A padded or packed batch.
        logits: The student's, with a gradient.
        signals: Each teacher's logits.
    """
    assert loss.token_kinds is not None
    values = loss.values(batch, logits, signals)
    batch = schema.with_numbers(batch)
    mask = student_tokens(batch).next_weights() > 0
    yield CROSS_ENTROPY, values.losses[:, :-1][mask].sum(), int(mask.sum())
    for index, (own, divergence) in enumerate(zip(loss.losses, values.divergences, strict=False)):
        if (view := own.chunks(batch)) is None:
            continue
        members = class_members(next_token_targets(batch), view, loss.token_kinds)
        total = torch.stack(divergence.parts).sum(0)
        for name, member in zip(CLASSES, members, strict=True):
            if member.any():
                yield f"{name}_t{index}", total[member].sum(), int(member.sum())


class Gradients:
    """Sums of values and of their gradients, by name.

    Args:
        weights: What is differentiated by.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self._gradients: dict[str, list[Tensor]] = {}
        self._values: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Tensor, count: int) -> None:
        """Add a value and its gradient; the value's graph is kept for the next one.

        Args:
            name: The sum.
            value: A sum over `count` chunks or tokens.
            count: Their number.
        """
        parts = torch.autograd.grad(value, self.weights, retain_graph=True, allow_unused=True, materialize_grads=True)
        if name in self._gradients:
            for total, part in zip(self._gradients[name], parts, strict=True):
                total.add_(part)
        else:
            self._gradients[name] = [part.clone() for part in parts]
        self._values[name] = self._values.get(name, 0.0) + value.item()
        self._counts[name] = self._counts.get(name, 0) + count

    def summary(self) -> dict[str, Any]:
        """Return `classes` and `cosine` as `measure_gradients` does."""
        names = list(self._gradients)
        products = {a: {b: self._product(a, b) for b in names} for a in names}
        norms = {name: products[name][name] ** 0.5 for name in names}
        means = {name: norms[name] / self._counts[name] for name in names}
        reference = means.get(CROSS_ENTROPY, 0.0)
        return {
            "classes": {
                name: {
                    "count": self._counts[name],
                    "value": self._values[name] / self._counts[name],
                    "norm": means[name],
                    "norm_ratio": means[name] / reference if reference else None,
                }
                for name in names
            },
            "cosine": {
                a: {b: products[a][b] / (norms[a] * norms[b]) if norms[a] and norms[b] else None for b in names}
                for a in names
            },
        }

    def _product(self, a: str, b: str) -> float:
        pairs = zip(self._gradients[a], self._gradients[b], strict=True)
        return float(sum((x.double() * y.double()).sum().item() for x, y in pairs))
