"""Forward pass of a teacher into a slot: logits, or hidden states and each row's column maxima."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from xtoken_core.config.workers import Content
from xtoken_core.evaluation import EvalResult, evaluate
from xtoken_core.losses.lazy_logits import HeadProjection, WholeLogits
from xtoken_core.losses.masks import predicted_ids
from xtoken_core.packing import PackedRow
from xtoken_core.topk_logits import largest_logits, write_topk
from xtoken_core.transports.ring import TopKSettings
from xtoken_services.common.models.logits_check import logits_are_heads
from xtoken_services.common.models.packed_attention import packed_inputs
from xtoken_services.teacher.base import HeldOutText, Teacher, TeacherBatch
from xtoken_services.teacher.quantized import local_part

log = logging.getLogger("xtoken.teacher")

WIDTH_BUCKET = 128
"""Widths of a compiled model are rounded up to a multiple of this, so that few shapes are compiled."""
CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time where only their maxima are needed."""
WIDTH_MULTIPLE = 64
"""Rows of logits of which the largest are taken are as wide as this allows, so that they are aligned."""


class TeacherModel(Teacher):
    """A causal language model in evaluation mode, with its body and head called separately.

    Args:
        model: The model, on its device.
        compiled: Compile its layers.
        longest: Maximum of tokens per sample, for packed rows.
        content: What it writes into slots.
        topk: What it writes of each position, if these are its largest logits.

    Attributes:
        before_forward: Called with the tokens on the host and the layout of a packed row before every forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compiled: bool = False,
        longest: int = 0,
        content: Content = "logits",
        topk: TopKSettings | None = None,
    ) -> None:
        self.model: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
        self.compiled, self.longest = compiled, longest
        self.content, self.topk = content, topk
        self.device = model.device
        self.head_width = self.head.shape[0]
        self.plain_head = head_is_plain(model)
        self._body: Any = model.base_model
        if compiled:
            compile_layers(self._body)
        self._chunk: Tensor | None = None
        self._warned = False
        self.before_forward: Callable[[Tensor, PackedRow | None], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights on this device; tied ones count once."""
        return sum(local_part(part).nbytes for part in (*self.model.parameters(), *self.model.buffers()))

    @property
    def head(self) -> Float[Tensor, "V_m H"]:
        """The head's weight."""
        weight: Tensor = self.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        return weight.detach()

    @contextmanager
    def head_in(self, memory: Float[Tensor, "V_m H"]) -> Iterator[None]:
        """Move the head into shared memory; on the model's own device the model then computes with it there.

        The head is thus in memory once, not twice, and so is an embedding tied to it. When the context ends it moves to
        the host, from where the next one takes it: the shared memory is freed then, and the device may be full.

        Args:
            memory: Shared memory of the ring. On another device, or in another dtype, it gets a copy and the model
                keeps its own head.
        """
        weight = self.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        memory.copy_(weight.detach())
        if memory.device != self.device or memory.dtype != weight.dtype:
            yield
            return
        weight.data = memory
        if memory.is_cuda:
            torch.cuda.empty_cache()  # the ring is outside torch's allocator: return the old head's memory to the GPU
        try:
            yield
        finally:
            weight.data = memory.to("cpu", copy=True)

    def _fill(self, batch: TeacherBatch, view: Tensor, maxima: Tensor | None) -> None:
        if self.topk is not None:
            self.write_topk(batch.ids, view, self.topk, batch.row)
        elif self.content == "hidden":
            self.write_hidden(batch.ids, view, maxima, batch.row)
        else:
            self.write_logits(batch.ids, view, batch.row)

    @torch.inference_mode()
    def write_logits(
        self, tokens: Int[Tensor, "B T"], out: Float[Tensor, "B T V_m"], row: PackedRow | None = None
    ) -> None:
        """Run the forward pass, with the head's product written into the slot itself.

        Args:
            tokens: Padded ids, on the host.
            out: A slot, on any device.
            row: The layout of a packed row; None: each row is a sample.
        """
        if self.plain_head and out.device == self.device and out.dtype == self.head.dtype:
            hidden = self.hidden(tokens, row)
            # Into the slot itself: whole logits are the largest tensor of a run, and a copy would double them.
            torch.mm(hidden.reshape(-1, hidden.shape[-1]), self.head.t(), out=out.view(-1, out.shape[-1]))
        elif self.plain_head:
            out.copy_(self.hidden(tokens, row) @ self.head.t(), non_blocking=True)
        else:
            self._warn_of_copies()
            out.copy_(self.model(**self._inputs(tokens, row)).logits, non_blocking=True)

    def _warn_of_copies(self) -> None:
        """Log once that the logits are copied into the slot instead of computed there."""
        if not self._warned:
            self._warned = True
            log.warning(
                "this teacher's logits are not just hidden states times head (a bias, a cap or a scale comes on top): "
                "its own forward makes each micro-batch's whole, and they are copied into the slot%s",
                "; their widths are not rounded up for teacher.compile" if self.compiled else "",
            )

    @torch.inference_mode()
    def write_hidden(
        self,
        tokens: Int[Tensor, "B T"],
        out: Float[Tensor, "B T H"],
        maxima: Float[Tensor, "B V_t"] | None,
        row: PackedRow | None = None,
    ) -> None:
        """Run the forward pass without logits; column maxima come from pieces of the head's product.

        Args:
            tokens: Padded ids, on the host.
            out: A slot's hidden states, on any device.
            maxima: A slot's column maxima; None if the loss does not need them.
            row: The layout of a packed row; None: each row is a sample.
        """
        hidden = self.hidden(tokens, row)
        out.copy_(hidden, non_blocking=True)
        if maxima is not None:
            maxima.copy_(self.column_maxima(hidden, maxima.shape[1]), non_blocking=True)

    @torch.inference_mode()
    def write_topk(
        self,
        tokens: Int[Tensor, "B T"],
        out: Float[Tensor, "B T W"],
        settings: TopKSettings,
        row: PackedRow | None = None,
    ) -> None:
        """Run the forward pass; each position's largest logits come from pieces of the head's product.

        A model whose logits are not just that product computes them whole.

        Args:
            tokens: Padded ids, on the host.
            out: A slot, on any device.
            settings: What is sent of each position.
            row: The layout of a packed row; None: each row is a sample.
        """
        if self.plain_head:
            width = -(-settings.vocab_size // WIDTH_MULTIPLE) * WIDTH_MULTIPLE  # the head has no more than it has
            source, head = self.hidden(tokens, row).flatten(0, 1), self.head[:width].t()
        else:
            source, head = self.model(**self._inputs(tokens, row)).logits.flatten(0, 1), None
        targets = predicted_ids(self._on_device(tokens)).flatten()
        # In pieces, since [B * T, V] in float32 would not fit beside the weights.
        for start in range(0, len(source), CHUNK_TOKENS):
            piece = source[start : start + CHUNK_TOKENS].unsqueeze(0)
            logits = piece if head is None else piece @ head
            largest = largest_logits(logits, targets[start : start + CHUNK_TOKENS].unsqueeze(0), settings)
            write_topk(largest, out.flatten(0, 1)[start : start + CHUNK_TOKENS].unsqueeze(0))

    def evaluate(self, text: HeldOutText) -> EvalResult:
        """See `Teacher.evaluate`."""

        def outputs(tokens: Tensor, row: PackedRow | None = None) -> WholeLogits:
            on_host = tokens.cpu()  # a divided model sends them to its other parts from there
            if self.plain_head:
                return HeadProjection(self.hidden(on_host, row), self.head)
            logits: Tensor = self.model(**self._inputs(on_host, row)).logits
            return logits

        return evaluate(
            self.model,
            text.tokenizer,
            text.documents,
            context_length=text.context_length,
            batch_tokens=text.batch_tokens,
            device=self.device,
            max_bytes=text.max_bytes,
            on_fraction=lambda done: self.report(f"measuring the held-out text: {done:.0%}"),
            outputs=outputs,
            packed_outputs=outputs if text.packed else None,
        )

    @torch.inference_mode()
    def column_maxima(self, hidden: Float[Tensor, "B T H"], vocab: int) -> Float[Tensor, "B V_t"]:
        """Return each row's largest logit per column `[B, V_t]`, padding included, in the logits' dtype.

        The transposed product `[V_m, tokens]` is computed piece by piece, so that each maximum is over adjacent memory.
        """
        rows, width, H = hidden.shape
        out = hidden.new_empty(vocab, rows)
        if self._chunk is None:
            self._chunk = hidden.new_empty(self.head.shape[0] * CHUNK_TOKENS)
        step = max(1, CHUNK_TOKENS // width)
        for first in range(0, rows, step):
            part = hidden[first : first + step]
            for start in range(0, width, CHUNK_TOKENS):
                piece = part[:, start : start + CHUNK_TOKENS]
                count, length = piece.shape[:2]
                logits = self._chunk[: self.head.shape[0] * count * length].view(-1, count * length)
                torch.mm(self.head, piece.reshape(-1, H).t(), out=logits)
                largest = logits[:vocab].view(vocab, count, length).amax(dim=-1)  # [V_t, rows]
                target = out[:, first : first + count]
                target.copy_(largest if start == 0 else torch.maximum(target, largest))
        return out.t()

    @torch.inference_mode()
    def hidden(self, tokens: Int[Tensor, "B T"], row: PackedRow | None = None) -> Float[Tensor, "B T H"]:
        """Return the last hidden states `[B, T, H]`, of a packed row if its layout is given."""
        rows, width = tokens.shape
        if self.compiled:
            tokens = self._bucketed(tokens, bounded=row is None)
        row = None if row is None else row.widened(tokens.shape[1])
        states: Tensor = self._body(**self._inputs(tokens, row)).last_hidden_state
        return states[:rows, :width]

    def _inputs(self, tokens: Tensor, row: PackedRow | None) -> dict[str, Any]:
        if self.before_forward is not None:
            self.before_forward(tokens, row)
        packed = {} if row is None else packed_inputs(row, self.device, longest=self.longest)
        return {"input_ids": self._on_device(tokens), "use_cache": False, **packed}

    def _bucketed(self, tokens: Tensor, *, bounded: bool) -> Tensor:
        """Pad on the right to a multiple of `WIDTH_BUCKET`; a causal model's other positions do not see the padding.

        Args:
            tokens: `[B, T]`.
            bounded: Positions are counted over the row, and the model may have no more than its configuration says.
        """
        width = tokens.shape[1]
        wanted = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET
        if bounded:
            longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or width
            wanted = max(width, min(wanted, longest))
        return torch.nn.functional.pad(tokens, (0, wanted - width), value=int(tokens[0, -1]))

    def _on_device(self, tokens: Tensor) -> Tensor:
        """Copy to the device without synchronisation."""
        if self.device.type != "cuda":
            return tokens.to(self.device)
        return tokens.pin_memory().to(self.device, non_blocking=True)


def compile_layers(body: nn.Module) -> None:
    """Compile a model's layers in place, one by one: they are alike, so that one compilation serves all."""
    layers: list[nn.Module] = [part for part in body.modules() if isinstance(part, GradientCheckpointingLayer)]
    for part in layers or [body]:
        part.compile()


def head_is_plain(model: PreTrainedModel) -> bool:
    """Return whether a model's logits are just its last hidden states times its head's weight."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return getattr(head, "bias", None) is None and logits_are_heads(model)
