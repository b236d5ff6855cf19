"""The identity of a store: the text, tokenizer, model and content that its records were made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

from xtoken_core.config.base import ConfigModel
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import Dtype, Quantized
from xtoken_core.errors import InputError
from xtoken_core.transports.ring import TOPK_DTYPE, TOPK_SCALARS


class StoreError(InputError):
    """A store, or a record of it, is missing, damaged or made from something else."""


class StoreIdentity(ConfigModel):
    """Identity of a store. A record depends on nothing else, so that runs of other order, steps or student read it.

    Attributes:
        format: Version of the files.
        content: Hidden states, or the largest logits of each position.
        text: Fingerprint of the text.
        records: Records of the text.
        append_eos: The end-of-text token is appended.
        tokenizer: Fingerprint of the tokenizer, of a chat template that is set and of a prompt.
        context_length: Tokens of a text beyond this are cut off.
        model: Fingerprint of the teacher's configuration and weights.
        dtype: Of the teacher's forward pass.
        quantized: Format of its linear layers' weights; None: its dtype.
        vocab_size: Tokens of its vocabulary.
        hidden_size: Width of the hidden states; 0 for largest logits.
        topk: Tokens of a position; 0 for hidden states.
        temperature: The loss's, at which largest logits have a second log-normaliser.
    """

    format: Literal[1] = 1
    content: Literal["hidden", "topk"]
    text: str
    records: int
    append_eos: bool
    tokenizer: str
    context_length: int
    model: str
    dtype: Dtype
    quantized: Quantized | None = None
    vocab_size: int
    hidden_size: int = 0
    topk: int = 0
    temperature: float = 1.0

    @property
    def value_dtype(self) -> str:
        """Dtype of the stored values."""
        return TOPK_DTYPE if self.topk else self.dtype

    @property
    def width(self) -> int:
        """Values of one token: as in a slot of a ring."""
        return 2 * self.topk + TOPK_SCALARS if self.topk else self.hidden_size

    def check(self, wanted: StoreIdentity, directory: str) -> None:
        """Refuse a store that was made from something else than a run needs.

        Raises:
            StoreError: Naming what differs.
        """
        different = list(self._differences(wanted))
        if different:
            raise StoreError(
                f"the store {directory} was built from something else: what differs is {', '.join(different)}; build "
                "another one with xtoken store build, or restore what it was built from"
            )

    def _differences(self, wanted: StoreIdentity) -> Iterator[str]:
        for name in type(self).model_fields:
            mine, other = getattr(self, name), getattr(wanted, name)
            if mine == other:
                continue
            hashed = isinstance(mine, str) and len(mine) > 16
            label = _LABELS.get(name, name)
            yield label if hashed else f"{label} ({mine} in the store, {other} in the run)"


_LABELS = {
    "text": "the text (data)",
    "records": "the number of records (data)",
    "append_eos": "data.append_eos",
    "tokenizer": "the teacher's tokenizer, chat template or prompt",
    "model": "the teacher's weights (teacher.model)",
    "context_length": "the teacher's context_length",
    "dtype": "teacher.dtype",
    "quantized": "teacher.quantized",
    "content": "teacher.content",
    "topk": "teacher.topk",
    "temperature": "loss.temperature",
}


def _after(prompt: str) -> str:
    return f" after {hashlib.sha256(prompt.encode()).hexdigest()}" if prompt else ""


def identity_of(run: ResolvedRun, teacher: int) -> StoreIdentity:
    """Return the identity of the store that a run needs for a teacher.

    Args:
        run: The run.
        teacher: Number of the teacher.
    """
    spec, files = run.spec.teacher[teacher], run.teachers[teacher]
    same = run.same_tokenizer[teacher]
    side = run.spec.student if same else spec
    template = (run.student if same else files).template_fingerprint
    by_topk = run.spec.content_of(teacher) == "topk"  # whole logits are refused beside a store
    return StoreIdentity(
        content="topk" if by_topk else "hidden",
        text=run.data_fingerprint,
        records=run.records,
        append_eos=run.spec.data.append_eos,
        tokenizer=files.tokenizer_fingerprint + (f" with {template}" if template else "") + _after(files.prompt),
        context_length=side.context_length,
        model=files.weights_fingerprint,
        dtype=spec.dtype,
        quantized=spec.quantized,
        vocab_size=files.vocab_size,
        hidden_size=0 if by_topk else files.hidden_size,
        topk=min(spec.topk, files.vocab_size) if by_topk else 0,
        temperature=run.spec.loss.temperature if by_topk else 1.0,
    )
