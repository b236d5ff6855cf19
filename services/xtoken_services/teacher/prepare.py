"""A teacher that is loaded here: its devices, its model as configured, and its forward pass into a slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec, TeacherSpec
from xtoken_core.config.workers import Content
from xtoken_core.errors import ConfigError
from xtoken_core.evaluation import EvalResult, evaluate
from xtoken_core.losses.lazy_logits import HeadProjection, WholeLogits
from xtoken_core.losses.masks import predicted_ids
from xtoken_core.packing import PackedRow
from xtoken_core.topk_logits import largest_logits, write_topk
from xtoken_core.transports.cuda_ipc import TRANSPORT as CUDA_IPC
from xtoken_core.transports.ring import TopKSettings
from xtoken_services.common.batches.step_plan import ring_shape, topk_settings
from xtoken_services.common.models.loading import load_model, nth_gpu, pick_device, takes_gpu
from xtoken_services.common.models.logits_check import logits_are_heads
from xtoken_services.common.models.packed_attention import copied_to, packed_inputs
from xtoken_services.common.run.memory_estimate import check_room, check_teacher, teacher_bytes, weight_bytes
from xtoken_services.teacher.base import HeldOutText, Teacher, TeacherBatch
from xtoken_services.teacher.quantized import QuantizedLinear, local_part, swap_linears

log = logging.getLogger("xtoken.teacher")


def device_of(spec: RunSpec, teacher: int, rank: int) -> torch.device:
    """Return the device of a rank's teacher: its student's, or the GPU that `teacher.gpu` names."""
    device, gpu = spec.workers.device, spec.teacher[teacher].gpu
    if gpu is None or not takes_gpu(device):
        return pick_device(device, rank)
    return nth_gpu(gpu + rank, f"{spec.teacher_name(teacher)} of rank {rank} (teacher.gpu = {gpu})")


def devices_of(spec: RunSpec, teacher: int, rank: int) -> list[torch.device]:
    """Return the devices of all parts of a rank's teacher, the ring's first.

    Raises:
        ConfigError: It is divided over more GPUs than there are.
    """
    settings = spec.teacher[teacher]
    if spec.fills_on_host(teacher):
        return [torch.device("cpu")]
    if settings.gpus == 1:
        return [device_of(spec, teacher, rank)]
    if not takes_gpu(spec.workers.device):
        return [torch.device("cpu")] * settings.gpus
    numbers = [settings.gpu_index(rank, part) for part in range(settings.gpus)]
    if numbers[-1] >= torch.cuda.device_count():
        raise ConfigError(
            f"{spec.teacher_name(teacher)} of rank {rank} takes GPUs {numbers[0]} to {numbers[-1]} (teacher.gpus = "
            f"{settings.gpus}), torch sees {torch.cuda.device_count()} here: lower teacher.gpus, teacher.gpu or "
            "workers.ranks"
        )
    return [torch.device("cuda", number) for number in numbers]


def prepared_model(run: ResolvedRun, teacher: int, device: torch.device, transport: str = "") -> TeacherModel:
    """Load a teacher, or this process's part of it, and apply its settings, if it fits its device.

    Args:
        run: The run.
        teacher: Number of the teacher.
        device: Its device.
        transport: Transport of its signal; empty in a process without a ring.

    Raises:
        ConfigError: It does not fit, or the device lacks what the settings need.
        InputError: It cannot be loaded.
    """
    spec, what = run.spec.teacher[teacher], run.spec.teacher_name(teacher)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kind = _format(spec, device, what)
    by_layer = spec.quantized == "nf4" and spec.gpus == 1  # its GPU never holds all weights in the dtype
    weights = teacher_bytes(spec) if by_layer else weight_bytes(spec.model, spec.dtype) // spec.gpus
    check_room(run, device)
    check_teacher(device, weights, ring_shape(run, teacher), what, ring_on_device=transport == CUDA_IPC)
    quantize = None if kind is None else partial(_quantize, spec=spec, what=what, kind=kind, device=device)
    on_host = quantize if by_layer else None
    model = load_model(spec, what, device, packed=run.packed, gpus=spec.gpus, on_host=on_host)
    if quantize is not None and on_host is None:
        quantize(model)
    content = run.spec.content_of(teacher)
    topk = topk_settings(run, teacher) if content == "topk" else None
    temperature = run.spec.rollout.teacher_temperature if run.spec.rollout is not None else 1.0
    return TeacherModel(
        model,
        compiled=spec.compile,
        longest=spec.context_length,
        content=content,
        topk=topk,
        of_completions=temperature,
    )


def _quantize(
    model: PreTrainedModel, *, spec: TeacherSpec, what: str, kind: type[QuantizedLinear], device: torch.device
) -> None:
    """Replace the linear layers of a teacher's body by quantized ones on its device.

    Raises:
        ConfigError: None fits the format.
    """
    count = swap_linears(model.base_model, kind, device)
    if not count:
        raise ConfigError(
            f"{what}: {spec.quantized} finds no linear layer whose sides are multiples of {kind.MULTIPLES[1]}: "
            "unset quantized"
        )
    log.info("%s: %d linear layers in %s", what, count, spec.quantized)


def _format(spec: TeacherSpec, device: torch.device, what: str) -> type[QuantizedLinear] | None:
    """Return the class of a teacher's quantized layers; None if they keep its dtype.

    Raises:
        ConfigError: The device, the dtype or this installation does not support it.
    """
    if spec.quantized == "fp8":
        check_fp8(device, spec.dtype, what)
        return Fp8Linear
    if spec.quantized is None:
        return None
    try:
        from xtoken_services.teacher.nf4 import Nf4Linear
    except ImportError as error:
        raise ConfigError(
            f"{what}: nf4 needs bitsandbytes ({error}): install it by pip install bitsandbytes"
        ) from error
    return Nf4Linear


LARGEST = 448.0
"""The largest finite value of `float8_e4m3fn`."""
OLDEST = (8, 9)
"""Compute capability of the first GPUs with float8 matrix products."""


class Fp8Linear(QuantizedLinear):
    """`x W^T + b` with `W` in `float8_e4m3fn`, one scale per row of `W` and one per token of `x`, which is bfloat16.

    Of a layer that is divided by columns, rows and tokens have a scale per process.
    """

    MULTIPLES = (16, 16)
    """Sides of a matrix must be multiples of these for the float8 kernels."""

    def quantize(self, weight: Float[Tensor, "N K"]) -> None:
        """Store a weight, divided by its rows' scales, and the scales."""
        weight = weight.float()
        scale = row_scale(weight)
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale.t().contiguous())

    def product(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        """Return `x W^T` in the dtype of `x`."""
        scale = row_scale(x)
        small = (x.float() / scale).to(torch.float8_e4m3fn)
        out: Tensor = torch._scaled_mm(
            small, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype, use_fast_accum=True
        )
        return out


def row_scale(x: Float[Tensor, "M K"]) -> Float[Tensor, "M 1"]:
    """Return the float32 scale of each row: divided by it, the row's largest value is the format's largest."""
    return x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST


def check_fp8(device: torch.device, dtype: str, what: str) -> None:
    """Refuse float8 on a device or with a dtype that does not support it.

    Raises:
        ConfigError: It is not supported; the text says why.
    """
    if device.type != "cuda":
        raise ConfigError(f"{what}: fp8 needs a GPU, and this teacher is on the {device.type.upper()}: unset quantized")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise ConfigError(
            f"{what}: fp8 needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer, "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: unset quantized"
        )
    if dtype != "bfloat16":
        raise ConfigError(f'{what}: fp8 goes with dtype = "bfloat16", not {dtype!r}')


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
        of_completions: Temperature of its distribution on samples that the student wrote.

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
        of_completions: float = 1.0,
    ) -> None:
        self.model: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
        self.compiled, self.longest = compiled, longest
        self.content, self.topk, self.of_completions = content, topk, of_completions
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
        completions = self._completions(batch)
        if self.topk is not None:
            self.write_topk(batch.ids, view, self.topk, batch.row, completions)
        elif self.content == "hidden":
            self.write_hidden(batch.ids, view, maxima, batch.row, completions)
        else:
            self.write_logits(batch.ids, view, batch.row, completions)

    def _completions(self, batch: TeacherBatch) -> list[tuple[int, slice]]:
        """Return row and tokens of each sample whose logits are not as the model gives them."""
        parts = zip(batch.positions, batch.parts(), strict=True) if self.of_completions != 1 else ()
        return [part for position, part in parts if position in batch.completions]

    def _sharpened(self, values: Float[Tensor, "B T N"], parts: Sequence[tuple[int, slice]]) -> Float[Tensor, "B T N"]:
        """Return logits, or hidden states, with those of some parts divided by `of_completions`."""
        for part in parts:
            values[part].mul_(1 / self.of_completions)  # in place, by a number: whole logits exist once
        return values

    @torch.inference_mode()
    def write_logits(
        self,
        tokens: Int[Tensor, "B T"],
        out: Float[Tensor, "B T V_m"],
        row: PackedRow | None = None,
        completions: Sequence[tuple[int, slice]] = (),
    ) -> None:
        """Run the forward pass, with the head's product written into the slot itself.

        Args:
            tokens: Padded ids, on the host.
            out: A slot, on any device.
            row: The layout of a packed row; None: each row is a sample.
            completions: Row and tokens of each sample whose logits are divided by `of_completions`.
        """
        if self.plain_head and out.device == self.device and out.dtype == self.head.dtype:
            hidden = self.hidden(tokens, row, completions)
            # Into the slot itself: whole logits are the largest tensor of a run, and a copy would double them.
            torch.mm(hidden.reshape(-1, hidden.shape[-1]), self.head.t(), out=out.view(-1, out.shape[-1]))
        elif self.plain_head:
            out.copy_(self.hidden(tokens, row, completions) @ self.head.t(), non_blocking=True)
        else:
            self._warn_of_copies()
            out.copy_(self._sharpened(self.model(**self._inputs(tokens, row)).logits, completions), non_blocking=True)

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
        completions: Sequence[tuple[int, slice]] = (),
    ) -> None:
        """Run the forward pass without logits; column maxima come from pieces of the head's product.

        Args:
            tokens: Padded ids, on the host.
            out: A slot's hidden states, on any device.
            maxima: A slot's column maxima; None if the loss does not need them.
            row: The layout of a packed row; None: each row is a sample.
            completions: As of `write_logits`.
        """
        hidden = self.hidden(tokens, row, completions)
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
        completions: Sequence[tuple[int, slice]] = (),
    ) -> None:
        """Run the forward pass; each position's largest logits come from pieces of the head's product.

        A model whose logits are not just that product computes them whole.

        Args:
            tokens: Padded ids, on the host.
            out: A slot, on any device.
            settings: What is sent of each position.
            row: The layout of a packed row; None: each row is a sample.
            completions: As of `write_logits`.
        """
        if self.plain_head:
            width = -(-settings.vocab_size // WIDTH_MULTIPLE) * WIDTH_MULTIPLE  # the head has no more than it has
            source, head = self.hidden(tokens, row, completions).flatten(0, 1), self.head[:width].t()
        else:
            whole = self._sharpened(self.model(**self._inputs(tokens, row)).logits, completions)
            source, head = whole.flatten(0, 1), None
        targets = predicted_ids(copied_to(self.device, tokens)).flatten()
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
    def hidden(
        self, tokens: Int[Tensor, "B T"], row: PackedRow | None = None, completions: Sequence[tuple[int, slice]] = ()
    ) -> Float[Tensor, "B T H"]:
        """Return the last hidden states `[B, T, H]`, sharper in completions, of a packed row if its layout is given."""
        rows, width = tokens.shape
        if self.compiled:
            tokens = self._bucketed(tokens, bounded=row is None)
        row = None if row is None else row.widened(tokens.shape[1])
        states: Tensor = self._body(**self._inputs(tokens, row)).last_hidden_state
        return self._sharpened(states[:rows, :width], completions)

    def _inputs(self, tokens: Tensor, row: PackedRow | None) -> dict[str, Any]:
        if self.before_forward is not None:
            self.before_forward(tokens, row)
        packed = {} if row is None else packed_inputs(row, self.device, longest=self.longest)
        return {"input_ids": copied_to(self.device, tokens), "use_cache": False, **packed}

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


def compile_layers(body: nn.Module) -> None:
    """Compile a model's layers in place, one by one: they are alike, so that one compilation serves all."""
    layers: list[nn.Module] = [part for part in body.modules() if isinstance(part, GradientCheckpointingLayer)]
    for part in layers or [body]:
        part.compile()


def head_is_plain(model: PreTrainedModel) -> bool:
    """Return whether a model's logits are just its last hidden states times its head's weight."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return getattr(head, "bias", None) is None and logits_are_heads(model)
