"""The run's own loss on held-out text, with the teachers loaded beside the student meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xtoken_core import schema
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.dataset.records import Document
from xtoken_core.errors import InputError
from xtoken_core.losses import CrossTokenizerDistillationLoss, combine_metrics
from xtoken_core.losses.chunk_classes import CLASSES, COUNT, MEAN
from xtoken_core.losses.lazy_logits import Logits
from xtoken_core.losses.masks import predicted_ids
from xtoken_core.packing import PackedRow
from xtoken_core.topk_logits import largest_logits
from xtoken_core.wire import Column
from xtoken_services.common.batches.packed_batch import PackedBatch, packed_batch
from xtoken_services.common.batches.step_plan import topk_settings
from xtoken_services.common.models.loading import load_model
from xtoken_services.common.models.packed_attention import packed_inputs
from xtoken_services.common.text.collation import make_collator, row_counts
from xtoken_services.trainer.metrics import to_floats
from xtoken_services.trainer.student import Student

DOCUMENTS = 64
"""Documents of the held-out text on which the run's loss is measured."""
REPORTED = (
    *("loss", "kl_loss", "ce_loss", "accuracy", "kl_common", "l1_uncommon", "proj_accuracy", "chunk_mass"),
    *("chain_start", "chain_inner", "chain_end", "unreachable_mass"),
)
BY_CLASS = tuple(f"{prefix}{name}_" for prefix in (MEAN, COUNT) for name in CLASSES)


class EvalBatch(NamedTuple):
    """Documents whose loss is measured together.

    Attributes:
        data: Their columns, padded or packed.
        rows: The layout of each side's packed row; None: each row is a document.
    """

    data: dict[str, Any]
    rows: tuple[PackedRow, ...] | None


class EvalLoss:
    """The run's loss on some documents, which are collated once as the run's own are.

    Args:
        run: The run.
        loss: Its loss.
        tokenizer: The student's.
        documents: Texts and records; the first `DOCUMENTS` are taken.
        progress: Called after every tokenizer that was loaded, and after every batch; it may raise to stop.
    """

    def __init__(
        self,
        run: ResolvedRun,
        loss: CrossTokenizerDistillationLoss,
        tokenizer: Any,
        documents: Iterable[Document],
        *,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        spec = run.spec
        assert spec.eval is not None
        self.run, self.spec, self.same_tokenizer, self.loss = run, spec, run.same_tokenizer, loss
        self.packed = run.packed
        collator = make_collator(run, tokenizer, progress)
        texts = [{"text": each} if isinstance(each, str) else each for each in islice(documents, DOCUMENTS)]
        longest = max(model.context_length for model in (spec.student, *spec.teacher))
        rows = max(1, spec.train.micro_batch_tokens // longest)
        count = row_counts(run)
        self.batches: list[EvalBatch] = []
        counts: list[Mapping[str, Tensor]] = []
        for i in range(0, len(texts), rows):
            if self.packed:
                collated = collator.rows(texts[i : i + rows], count)
                for reason in collated.refused.values():
                    raise InputError(f"the held-out text: {reason}")
                made = _packed(collated.columns, 1 + len(spec.teacher))
                self.batches.append(EvalBatch(made.data, made.rows))
                counts.append(made.data)
            else:
                data = dict(collator.padded(texts[i : i + rows]))
                counts.append(count(data))
                self.batches.append(EvalBatch(data | dict(counts[-1]), None))
            progress()
        self.tokens = sum(int(found[schema.CE_TOKENS.name].sum()) for found in counts)
        self.chunks = [
            self.tokens if same else sum(int(c[schema.field_name(schema.KD_CHUNKS, index)].sum()) for c in counts)
            for index, same in enumerate(self.same_tokenizer)
        ]
        self._selected: float | None = None

    @torch.no_grad()
    def measure(
        self, student: Student, kl_loss_weight: float, *, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return the loss and its parts, means over all documents, named as in `steps.jsonl` with a prefix `held_out_`.

        All teachers are on the student's device meanwhile, each in its dtype, a quantized one too.

        Args:
            student: The student.
            kl_loss_weight: Weight of the divergence.
            progress: Called after every teacher that was loaded, and after every batch; it may raise to stop.

        Raises:
            InputError: A teacher cannot be loaded.
        """
        try:
            return self._measured(student, kl_loss_weight, progress)
        finally:
            if student.device.type == "cuda":
                torch.cuda.empty_cache()  # a teacher's process on this GPU cannot use what this one only caches

    def _measured(self, student: Student, weight: float, progress: Callable[[], None]) -> dict[str, float]:
        """Compute `measure`; the teachers are freed with this frame."""
        teachers = self.load_teachers(student.device, progress)
        if self.loss.selects_teacher and self._selected is None:
            self._selected = self._selected_chunks(teachers, student.device, progress)
        parts = []
        for batch in self.batches:
            tensors = on_device(batch.data, student.device)
            signals = self.signals(teachers, tensors, batch.rows)
            _, metrics = self.loss(
                tensors,
                student.outputs(tensors[schema.INPUT_IDS.name], batch.rows[0] if batch.rows else None),
                signals,
                global_valid_toks=self.tokens,
                global_valid_chunks=self.chunks,
                global_selected_chunks=self._selected,
                blocks=self.loss.token_blocks(batch.data, [s.shape[1] for s in signals]) if student.blockwise else None,
                kl_loss_weight=weight,
            )
            parts.append(metrics)
            progress()
        found = combine_metrics(to_floats(parts))
        return {f"held_out_{name}": value for name, value in found.items() if name.startswith(REPORTED + BY_CLASS)}

    def load_teachers(self, device: torch.device, progress: Callable[[], None] = lambda: None) -> list[PreTrainedModel]:
        """Load all teachers.

        Args:
            device: Where they are put.
            progress: Called after each; it may raise to stop.

        Raises:
            InputError: One cannot be loaded.
        """
        teachers = []
        for number, spec in enumerate(self.spec.teacher):
            teacher = load_model(spec, self.spec.teacher_name(number), device, packed=self.packed)
            teachers.append(teacher.eval())  # type: ignore[no-untyped-call]
            progress()
        return teachers

    def _selected_chunks(
        self, teachers: Sequence[PreTrainedModel], device: torch.device, progress: Callable[[], None]
    ) -> float:
        """Return the chunks of the teachers that `select_teacher` chooses over all batches, whatever the student."""
        chunks = 0.0
        for batch in self.batches:
            tensors = on_device(batch.data, device)
            chunks += float(self.loss.select(tensors, self.signals(teachers, tensors, batch.rows)).chunks)
            progress()
        return chunks

    def signals(
        self, teachers: Sequence[PreTrainedModel], tensors: Mapping[str, Tensor], rows: tuple[PackedRow, ...] | None
    ) -> list[Logits]:
        """Return each teacher's logits of a batch as the run compares them: `[B, T_t, V_m]`, or the largest.

        Args:
            teachers: From `load_teachers`.
            tensors: A batch on their device.
            rows: The layout of each side's packed row; None: each row is a document.
        """
        signals: list[Logits] = []
        for index, (same, teacher) in enumerate(zip(self.same_tokenizer, teachers, strict=True)):
            ids = schema.INPUT_IDS.name if same else schema.field_name(schema.TEACHER_INPUT_IDS, index)
            packed = {}
            if rows is not None:
                longest = self.spec.teacher[index].context_length
                packed = packed_inputs(rows[1 + index], teacher.device, longest=longest)
            logits = teacher(input_ids=tensors[ids], use_cache=False, **packed).logits
            if self.spec.content_of(index) == "topk":
                logits = largest_logits(logits, predicted_ids(tensors[ids]), topk_settings(self.run, index))
            signals.append(logits)
        return signals


def _packed(columns: Mapping[str, Column], sides: int) -> PackedBatch:
    """Pack documents for the student and every teacher; rows have no padding, so that no pad id is read."""
    lengths = [schema.INPUT_LENGTHS.name]
    lengths += [schema.field_name(schema.TEACHER_INPUT_LENGTHS, teacher) for teacher in range(sides - 1)]
    own = columns[lengths[0]]
    widths = [sum(columns.get(name, own).values.cast("q")) for name in lengths]
    return packed_batch(columns, widths=widths, pad_ids=[0] * sides)


def on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return a batch's tensors on a device."""
    return {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)}
