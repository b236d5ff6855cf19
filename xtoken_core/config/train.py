"""How the student is trained: optimiser, precision, ranks, adapters, and what is told of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xtoken_core.config.base import Count, NoneWord, Part
from xtoken_core.config.loss import NonNegative, Positive

Share = Annotated[float, Field(ge=0, lt=1)]


class LoraSpec(Part):
    """Train low-rank adapters instead of the student's own weights; needs the extra `lora` (peft)."""

    rank: Count = 16
    """Of every adapter."""
    alpha: Positive = 32.0
    """What an adapter adds is scaled by `alpha / rank`."""
    dropout: Share = 0.0
    """Before an adapter's first matrix."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get one, such as `["q_proj", "v_proj"]`; left out, all but the head."""
    export: Literal["merged", "adapter"] = "merged"
    """What the run leaves: a whole model with the adapters added to its weights, or the adapters alone."""


class TrainSpec(Part):
    """The optimiser's part."""

    samples_per_step: Count = 32
    """Records of one optimiser step, over all ranks."""
    max_steps: Count | None = None
    """End after so many optimiser steps, if the epochs have not ended before."""
    micro_batch_tokens: Count = 8192
    """Padded tokens of one micro-batch at most, on the student's side and on each teacher's."""
    learning_rate: Positive = 1e-4
    """AdamW's highest rate, reached after the warm-up."""
    min_learning_rate: NonNegative = 0.0
    """Where the cosine ends."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of the linear warm-up."""
    weight_decay: NonNegative = 0.0
    """AdamW's; vectors (biases, norms) are left out."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's."""
    grad_clip: Annotated[Positive | None, NoneWord] = 1.0
    """The gradient's norm at most; "none" leaves it as it is."""
    master_weights: bool = True
    """For a student in bfloat16: keep its weights, their gradients and AdamW's moments in float32, and
    compute with a copy. Off, all of them are in the student's dtype: half the memory or less, and a change smaller than
    a weight's last bit is lost."""
    parallel: Literal["replicate", "fsdp"] = "replicate"
    """With several ranks: each holds the whole student, or (`fsdp`) a share of its weights, gradients and moments."""
    reshard_after_forward: bool = True
    """With `fsdp`: a layer's gathered weights are let go after the forward pass and gathered again for the backward.
    Off, they stay in between: less traffic, and for that time every rank holds the whole student's weights."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """With `fsdp`: what gradients are added up in over ranks. In bfloat16 it is half the traffic, and the same sum for
    two ranks that train in bfloat16; with more ranks every addition rounds."""
    max_nonfinite_steps: Count = 5
    """So many steps in a row without a finite loss and gradient end the run; such a step is left out and reported."""
    checkpoint_every: Count = 100
    """Steps between two checkpoints; the last step always has one."""
    keep_checkpoints: Count = 2
    """The newest so many stay."""
    lora: LoraSpec | None = None


class ReportSpec(Part):
    """Where a run's figures go beside `steps.jsonl` and `eval.jsonl`."""

    console_every: Count = 10
    """Steps between two lines in the trainer's log."""
    tensorboard: bool = False
    """Event files in `tensorboard/` of the output; needs the extra `tensorboard`."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases, by files in `wandb/` of the output or over the network; needs the extra `wandb`."""
    wandb_project: str = "xtoken"
    """The project that the run is listed under."""
    peak_tflops: Positive | None = None
    """What the device can do in bfloat16, for the utilisation (MFU); left out, known for common GPUs."""
