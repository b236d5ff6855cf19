"""The identity of a run: what a checkpoint has in common with every run that may resume it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import field_validator

from xtoken_core.config.base import Part
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.train import LoraSpec, OptimizerName


class ModelIdentity(Part):
    """The student, or a teacher.

    Attributes:
        model: Fingerprint of its configuration and weights.
        tokenizer: Fingerprint of its tokenizer.
        context_length: Tokens of a text beyond this are cut off.
        dtype: Of its weights.
        chat_template: Fingerprint of the chat template that the settings name; empty: the tokenizer's own.
    """

    model: str
    tokenizer: str
    context_length: int
    dtype: str
    chat_template: str = ""


class TeacherIdentity(ModelIdentity):
    """A teacher.

    Attributes:
        projection: Fingerprint of its projection, or of the chain tables.
        weight: Static weight in the loss.
        fp8: Its matrix products are in float8.
        topk: Tokens of a position that it is given by; None: it is given by all.
        topk_mass: Fraction of the probability that these reach.
    """

    projection: str
    weight: float = 1.0
    fp8: bool = False
    topk: int | None = None
    topk_mass: float | None = None


class RunIdentity(Part):
    """Identity of a run: models, data, loss and precision.

    How the optimiser goes about it (rates, clipping, decay) and how the work is spread over processes and GPUs is no
    part of it. A field that is added later needs a default that means what runs did before: a checkpoint without the
    field is read with it, and stays a checkpoint of the same run.

    Attributes:
        data: Fingerprint of the text.
        packed: The samples of a micro-batch lie in one row.
        float32_weights: The optimiser's weights are float32.
        optimizer: Kind of the state that a checkpoint holds.
    """

    name: str
    seed: int
    data: str
    records: int
    positions: int
    shuffle: bool
    append_eos: bool
    samples_per_step: int
    micro_batch_tokens: int
    packed: bool = False
    student: ModelIdentity
    float32_weights: bool
    lora: LoraSpec | None = None
    optimizer: OptimizerName = "adamw"
    teacher: tuple[TeacherIdentity, ...]
    loss: LossConfig

    @field_validator("loss", mode="before")
    @classmethod
    def _without_unread_temperature(cls, loss: Any) -> Any:
        """Drop the temperature of ALM that checkpoints of other modes have stored from an earlier default."""
        if isinstance(loss, dict) and not {loss.get("mode"), *loss.get("teacher_modes", ())} & {"alm", "custom"}:
            return {name: value for name, value in loss.items() if name != "alm_temperature"}
        return loss

    def differences(self, other: RunIdentity) -> list[str]:
        """Return the paths of the values that differ, such as `teacher.0.weight`."""
        return list(_differences(self.model_dump(mode="json"), other.model_dump(mode="json"), ""))


def _differences(mine: Any, other: Any, path: str) -> Iterator[str]:
    """Yield the path of every leaf that differs; of a part that one side lacks, the part's own."""
    if isinstance(mine, list) and isinstance(other, list):
        mine, other = dict(enumerate(mine)), dict(enumerate(other))
    if not (isinstance(mine, dict) and isinstance(other, dict)):
        if mine != other:
            yield path
        return
    for key in dict.fromkeys([*mine, *other]):
        yield from _differences(mine.get(key), other.get(key), f"{path}.{key}" if path else str(key))
