"""The loss of a `TokenizerPair` inside other trainers: `transformers.Trainer`, its subclasses, and accelerate's loops.

A step's loss is a sum over its micro-batches and processes, each divided by the whole step's counts, as in a run of
`xtoken run`: it does not depend on how the step is divided.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Trainer

from xtoken.pair import TokenizerPair, aligned_rows
from xtoken_core import schema
from xtoken_core.errors import ConfigError
from xtoken_core.losses.masks import loss_counts, student_tokens

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]  # ships no stubs

log = logging.getLogger("xtoken")

NAMED = ("ce_loss", "kl_loss")
"""Parts of a loss that are logged beside it, under the names of `steps.jsonl`."""
COUNTS = (schema.CE_TOKENS.name, schema.field_name(schema.KD_CHUNKS, 0))


class DistillationCollator:
    """A collator for a `DataLoader`: aligned rows on the CPU, with what each adds to the counts of its step.

    Args:
        pair: The two tokenizers.
    """

    def __init__(self, pair: TokenizerPair) -> None:
        self._collator, self._config = pair.collator, pair.loss_fn.config

    def __call__(self, records: Sequence[str | Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate records as `TokenizerPair.collate` does, and add `ce_tokens` and `kd_chunks`, `[B]`, weighted.

        Raises:
            InputError: A record cannot be used.
        """
        batch = schema.with_numbers(dict(aligned_rows(self._collator, records)))
        tokens, chunks = (loss_counts(self._config, [False])(batch)[name] for name in COUNTS)
        weights = batch[schema.SAMPLE_MASK.name]  # a fraction weighs the cross-entropy only
        return batch | dict(zip(COUNTS, (tokens * weights, chunks * (weights > 0)), strict=True))


def step_counts(batches: Sequence[Mapping[str, Tensor]], accelerator: Accelerator) -> Float[Tensor, " 2"]:
    """Return the next-token predictions and the chunks of a step: of all its micro-batches on all processes.

    Args:
        batches: This process's micro-batches, from a `DistillationCollator`.
        accelerator: Of accelerate; every process has to call.
    """
    counts = torch.tensor([sum(float(batch[name].sum()) for batch in batches) for name in COUNTS])
    total: Tensor = accelerator.gather(counts.unsqueeze(0).to(accelerator.device)).sum(0)
    return total


def distillation_loss(
    pair: TokenizerPair,
    teacher: nn.Module,
    student: nn.Module,
    batch: Mapping[str, Tensor],
    counts: Float[Tensor, " 2"] | None = None,
    *,
    processes: int = 1,
) -> tuple[Float[Tensor, ""], dict[str, Tensor], Any]:
    """Compute one micro-batch's part of a step's loss; no gradient reaches the teacher.

    Args:
        pair: The two tokenizers and their loss.
        teacher: A causal model of `transformers`, on the device of the batch.
        student: Likewise.
        batch: From a `DistillationCollator`.
        counts: Of `step_counts`; None: the micro-batch is the step.
        processes: Processes over which gradients are averaged afterwards; the loss is multiplied by this.

    Returns:
        The loss, its metrics, and what the student returned.
    """
    with torch.no_grad():
        theirs = teacher(input_ids=batch[schema.field_name(schema.TEACHER_INPUT_IDS, 0)]).logits
    outputs = student(input_ids=batch[schema.INPUT_IDS.name])
    tokens, chunks = (None, None) if counts is None else counts.unbind()
    loss, metrics = pair.loss_fn(
        batch, outputs.logits, [theirs], global_valid_toks=tokens, global_valid_chunks=[chunks]
    )
    return loss * processes, dict(metrics), outputs


class Distillation:
    """A mixin that gives `transformers.Trainer`, or a subclass such as TRL's `SFTTrainer`, a teacher.

    `DistillationTrainer` is the first. For another, name this before it among the bases, and turn off what prepares
    records (`SFTConfig(dataset_kwargs={"skip_prepare_dataset": True})`). `ce_loss` and `kl_loss` are logged beside
    `loss`; `save_model` writes the student's tokenizer too. One teacher, whole in every process; weights of the
    loss are constant. FSDP and DeepSpeed are untried.

    Args:
        *args: Of the trainer; the student in float32.
        pair: `TokenizerPair(student_tokenizer, teacher_tokenizer, device=...)`, with the trainer's device.
        teacher: A causal model of `transformers`.
        **kwargs: Of the trainer; data sets have texts, or records as `TokenizerPair.collate` takes them.

    Raises:
        ConfigError: The pair is on another device, a setting changes no loss, the process has several GPUs, or the
            teacher is not loaded.
    """

    def __init__(self, *args: Any, pair: TokenizerPair, teacher: nn.Module, **kwargs: Any) -> None:
        if not isinstance(teacher, nn.Module):
            raise ConfigError(f"teacher: {str(teacher)!r} is no model: load it by AutoModelForCausalLM.from_pretrained")
        own = {"data_collator": DistillationCollator(pair), "processing_class": pair.tokenizer}
        super().__init__(*args, **own | kwargs)
        trainer: Any = self
        gpus, device = trainer.args.n_gpu, trainer.args.device
        if gpus > 1 or pair.device.type != device.type:
            raise ConfigError(
                f"the pair is on {pair.device}, the trainer on {device} of {max(gpus, 1)}: give the TokenizerPair "
                f'device="{device.type}", and start a process per GPU (torchrun)'
            )
        if any(one.requires_grad and one.dtype.itemsize < 4 for one in trainer.model.parameters()):
            log.warning(
                "the student's weights are %s: small updates are lost in them, and a CPU is slow with them; load it "
                'with dtype="float32" (bf16=True computes in bfloat16 on a GPU)',
                trainer.model.dtype,
            )
        if trainer.args.label_smoothing_factor or trainer.compute_loss_func:
            raise ConfigError("the pair's loss has no label_smoothing_factor and no compute_loss_func: leave them out")
        # None would join the batches of all processes of a stream, whose widths differ.
        trainer.accelerator.dataloader_config.dispatch_batches = bool(trainer.accelerator.dispatch_batches)
        self.pair, self.teacher = pair, teacher.eval().requires_grad_(False).to(device)
        self._parts, self._steps = torch.zeros(len(NAMED), device=device), 0
        trainer.args.remove_unused_columns = False  # records have the columns of texts, not of models
        trainer.label_names = [schema.INPUT_IDS.name]  # an evaluation reports a loss only where there are labels
        trainer.model_accepts_loss_kwargs = True  # or the loss would be divided by the number of micro-batches too

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the micro-batches of a step, and the counts of the whole step."""
        trainer: Any = super()
        batches, _ = trainer.get_batch_samples(epoch_iterator, num_batches, device)
        self._steps += bool(batches)
        return batches, step_counts(batches, self.accelerator) if batches else None  # type: ignore[attr-defined]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a micro-batch; `num_items_in_batch` are its step's counts, None in an evaluation."""
        counts = num_items_in_batch if isinstance(num_items_in_batch, Tensor) else None
        processes = 1 if counts is None else self.accelerator.num_processes  # type: ignore[attr-defined]
        loss, metrics, outputs = distillation_loss(self.pair, self.teacher, model, inputs, counts, processes=processes)
        if counts is not None:
            self._parts += torch.stack([metrics[name].detach().float() for name in NAMED])
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Return the loss and, for `compute_metrics`, logits and labels: `input_ids`, -100 where nothing is learnt."""
        trainer: Any = super()
        loss, logits, _ = trainer.prediction_step(model, inputs, *args, **kwargs)
        labels = inputs[schema.INPUT_IDS.name].masked_fill(student_tokens(inputs).weights() == 0, -100)
        return loss, logits, None if logits is None else labels

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log beside a loss its parts, each the mean over the steps since the last time, as the loss is."""
        trainer: Any = super()
        if "loss" in logs and self._steps:
            parts = self.accelerator.reduce(self._parts) / self._steps  # type: ignore[attr-defined]
            logs |= dict(zip(NAMED, parts.tolist(), strict=True))
            self._parts, self._steps = torch.zeros_like(self._parts), 0
        trainer.log(logs, *args, **kwargs)


class DistillationTrainer(Distillation, Trainer):
    """`transformers.Trainer` with a teacher; see `Distillation` for the further arguments."""
