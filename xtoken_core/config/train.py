"""Settings of training: optimiser, precision, ranks, LoRA, reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from xtoken_core.config.base import ConfigModel, Count, OrNone
from xtoken_core.config.loss import NonNegative, Positive

Fraction = Annotated[float, Field(ge=0, lt=1)]
OptimizerName = Literal["adamw", "adafactor"]


class LoraSpec(ConfigModel):
    """Train low-rank adapters instead of the student's own weights; needs the extra `lora` (peft)."""

    rank: Count = 16
    """Rank of every adapter."""
    alpha: Positive = 32.0
    """Scale: an adapter's output is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get one, such as `["q_proj", "v_proj"]`; left out, all but the head."""
    export: Literal["merged", "adapter"] = "merged"
    """Exported model: a whole model with merged adapters, or the adapters only."""


class TrainSpec(ConfigModel):
    """Optimiser, batch sizes, precision, parallelism and checkpoints."""

    samples_per_step: Count = 32
    """Records of one optimiser step, over all ranks."""
    max_steps: Count | None = None
    """End after so many optimiser steps, if the epochs have not ended before."""
    micro_batch_tokens: Count = 8192
    """Maximum of tokens per micro-batch, padding included, on the student's side and on each teacher's."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Put the samples of a micro-batch one after the other into one row, without attention among them, instead of each
    into a padded row. `auto`: if the student and every teacher can be packed; `on`: refuse a run if one cannot."""
    optimizer: OptimizerName = "adamw"
    """`adafactor` keeps the second moment as a row and a column and no first one: half the memory beyond the weights or
    less. It needs whole weights, not `parallel = "fsdp"`."""
    learning_rate: Positive = 1e-4
    """The highest rate, reached after the warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course of the rate from the warm-up to the end. `wsd` (warm-up, stable, decay) keeps the highest rate until the
    last fifth of the run, and then falls as `linear` does."""
    min_learning_rate: NonNegative = 0.0
    """Rate at the end of the schedule; not read by `constant`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of the linear warm-up."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; vectors (biases, norms) are excluded."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    grad_clip: OrNone[Positive] = 1.0
    """Maximum norm of the gradient; "none": no clipping."""
    master_weights: bool = True
    """For a student in bfloat16: keep its weights, their gradients and AdamW's moments in float32, and
    compute with a copy. Off, all of them are in the student's dtype: half the memory or less, and a change smaller than
    a weight's last bit is lost."""
    parallel: Literal["replicate", "fsdp"] = "replicate"
    """With several ranks: each holds the whole student, or (`fsdp`) a shard of its weights, gradients and moments."""
    reshard_after_forward: bool = True
    """With `fsdp`: a layer's gathered weights are freed after the forward pass and gathered again for the backward.
    Off, they are kept in between: less traffic, but every rank then holds the whole student's weights."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """With `fsdp`: dtype of the reduction of gradients over ranks. bfloat16 halves the traffic and gives the same sum
    for two ranks that train in bfloat16; with more ranks every addition rounds."""
    checkpoint_every: Count = 100
    """Steps between two checkpoints; the last step always has one."""
    checkpoint_minutes: OrNone[Positive] = 30.0
    """Minutes after a checkpoint in which the next one is written, whatever `checkpoint_every` says; "none": never."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints that are kept."""
    lora: OrNone[LoraSpec] = None

    @model_validator(mode="after")
    def _whole_weights(self) -> TrainSpec:
        if self.parallel == "fsdp" and self.optimizer != "adamw":
            raise ValueError(
                f'train.optimizer = "{self.optimizer}" needs whole weights, which train.parallel = "fsdp" divides: '
                'use "adamw", or "replicate"'
            )
        return self


class ReportSpec(ConfigModel):
    """Metric loggers beside `steps.jsonl` and `eval.jsonl`."""

    tensorboard: bool = False
    """Event files in `tensorboard/` of the output; needs the extra `tensorboard`."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases, by files in `wandb/` of the output or over the network; needs the extra `wandb`. The project is
    "xtoken", or what the environment variable `WANDB_PROJECT` names."""
