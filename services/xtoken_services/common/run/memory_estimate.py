"""The estimate of a run's memory: of each process on the host, in shared memory and on GPUs. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec, TeacherSpec
from xtoken_core.errors import ConfigError
from xtoken_core.regular_files import read_json_object
from xtoken_core.transports.ring import RingShape
from xtoken_core.wire.columns import ITEM_SIZES
from xtoken_services.common.batches.step_plan import ring_shape
from xtoken_services.common.models.weights import weight_count, weight_counts
from xtoken_services.common.processes.supervised import supervised

if TYPE_CHECKING:  # workers have imported it, a start has no need of it
    import torch

    from xtoken_core.losses.base import Loss

log = logging.getLogger("xtoken.memory")

FLOAT32 = ITEM_SIZES["float32"]
GIB = 1 << 30
COPIES = 4
"""Values that a student keeps per weight: the weight, its gradient, AdamW's two moments."""
FEWER = {"adamw": 0, "adafactor": 2}
"""Values per weight that an optimiser keeps less than AdamW: Adafactor keeps next to none."""
NF4_BITS = 9
"""Half bits of a weight in NormalFloat 4: one of 4 bits, and a float32 scale for 64 of them."""
BLOCK_ROWS = 2048
"""Positions of a block of a head that is multiplied block by block."""
HIDDEN_VALUES, INNER_VALUES, KEY_VALUES = 8, 4, 2
"""Values that a layer keeps of a token for its backward, per hidden unit, per unit of its feed-forward part, and per
key: of a Llama the inputs of norms and projections, queries, keys and values, and both sides of the gate."""
WIDENED = 2
"""The same per hidden unit where the dtype is narrower than float32: norms widen their inputs, and keep both."""
COMPILED = 0.7
"""Part of them that a compiled student keeps: norms and gates are computed again."""
GPU_COPIES, CPU_COPIES = 3, 4
"""Values in a trainer for each of the student's logits: with their gradient, and what the loss makes of them."""
TEACHER_COPIES, TEACHER_COPIES_BLOCKWISE = 9, 4
"""The same for each of a teacher's on a CPU, whose operators have no kernels. Both are as `benchmarks/sizing.py` has
measured on a CPU, and as the peaks of `benchmarks/results/end_to_end.json` are."""
SORTED_COPIES = 4
"""Of its logits in a teacher that finds the largest ones on a CPU."""
PIECE_TOKENS, PIECES = 1024, 2
"""On a GPU a teacher has them in pieces of so many tokens, and one piece while the next is made."""
ADJUSTED_COPIES = 2
"""Of whole logits in a teacher that caps or scales them: its own forward pass makes them, and then the result."""
ADJUSTMENTS = ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling")
"""Settings of such models; 1 and null change nothing."""
MIB = 1 << 20
PROCESS_MIB = {"supervisor": 86, "queue": 50, "collator": 356, "model": 380, "trainer": 450}
"""Resident memory of a process in MiB before it has read a model or a large tokenizer, as `benchmarks/sizing.py` has
measured."""
TOKENIZER_BYTES = 13
"""Bytes that supervisor and collators each take for a byte of `tokenizer.json`, measured with those of real models."""
CONTEXT_BYTES, CUDA_HOST_BYTES = 960 * MIB, 1536 * MIB
"""What CUDA takes for each process on its GPU (its context, kernels once loaded, workspaces, and what torch's allocator
keeps unused: `benchmarks/sizing.py`, with models of 135M and 1.5B), and on the host (`benchmarks/worker_kills`)."""
TRAINER_BYTES = 340 * MIB
"""What a trainer on a GPU takes beyond that on the host, as `benchmarks/sizing.py` has measured. What takes it has
not been profiled."""
CUDA_BUILD_BYTES = 480 * MIB
"""Libraries of torch's CUDA build in a collator, which uses no GPU, beside the CPU build's."""
SHARED, STAGED = "/dev/shm", "the copy for checkpoints"
REMEDIES = (
    "give teachers a GPU of their own (teacher.gpu), lower workers.slots or train.micro_batch_tokens, share the "
    'student among ranks (train.parallel = "fsdp"), or train without float32 masters (train.master_weights = false)'
)
FEWER_SLOTS = "lower train.samples_per_step, all of whose signals select_teacher holds at once"
"""If the teachers beside the student are too much."""


class Where(StrEnum):
    """Kind of memory; that of a device is the host's where models are on CPUs."""

    DEVICE = "device"
    HOST = "host"
    SHARED = "shared"


@dataclass(frozen=True)
class MemoryUse:
    """Memory that one part of a run takes.

    Attributes:
        what: The part, in words.
        nbytes: Its size.
        process: Name of the process that takes it.
        where: Kind of memory.
        gpu: Number of the device, from 0, before it is taken modulo the number of GPUs.
        stays: It stays between micro-batches, and its size is exact.
    """

    what: str
    nbytes: int
    process: str = ""
    where: Where = Where.DEVICE
    gpu: int = 0
    stays: bool = True


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, from its `config.json`.

    Attributes:
        hidden: Units of the residual stream.
        inner: Units of a feed-forward part, of a mixture those of the experts that a token is sent to.
        keys: Units of keys, and of values.
        layers: Number of layers.
        vocabulary: Rows of the head.
        adjusted: Its logits are capped or scaled.
    """

    hidden: int
    inner: int
    keys: int
    layers: int
    vocabulary: int
    adjusted: bool = False

    @classmethod
    def of(cls, directory: Path) -> ModelSizes:
        """Return a model's sizes; what its configuration does not name is taken to be as in GPT-2."""
        config = read_json_object(directory / "config.json")
        text: dict[str, Any] = config.get("text_config", config)

        def first(*names: str, default: int = 0) -> int:
            return next((int(text[name]) for name in names if isinstance(text.get(name), int)), default)

        hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head", default=1)
        inner = first("moe_intermediate_size", "intermediate_size", "n_inner", default=4 * hidden)
        keys = first("head_dim", default=hidden // heads) * first("num_key_value_heads", default=heads)
        layers = first("num_hidden_layers", "n_layer", default=1)
        adjusted = any(text.get(name) not in (None, 1) for name in ADJUSTMENTS)
        inner *= first("num_experts_per_tok", default=1)
        return cls(hidden, inner, keys, layers, first("vocab_size"), adjusted)

    def per_layer(self, item: int) -> int:
        """Return the values of `item` bytes that a layer keeps of a token for its backward."""
        hidden = HIDDEN_VALUES + (WIDENED if item < FLOAT32 else 0)
        return hidden * self.hidden + INNER_VALUES * self.inner + KEY_VALUES * self.keys


def weight_bytes(directory: Path, dtype: str) -> int:
    """Return the bytes of a model's weights in a dtype."""
    return weight_count(directory) * ITEM_SIZES[dtype]


def teacher_bytes(teacher: TeacherSpec) -> int:
    """Return the bytes of a teacher's weights while it runs; those that are not quantized count as if they were."""
    if teacher.quantized == "nf4":
        return weight_count(teacher.model) * NF4_BITS // 16
    weights = weight_bytes(teacher.model, teacher.dtype)
    return weights // 2 if teacher.quantized == "fp8" else weights


def student_bytes(spec: RunSpec) -> int:
    """Return the bytes of a rank's weights, gradients and moments; adapters and their state are not counted."""
    count, item, train = weight_count(spec.student.model), ITEM_SIZES[spec.student.dtype], spec.train
    if train.lora is not None:
        return count * item
    masters = train.master_weights and item < FLOAT32
    # With float32 masters a sharded student has no other weights.
    own = count * item if masters and shards(spec) == 1 else 0
    return own + count * (COPIES - FEWER[train.optimizer]) * (FLOAT32 if masters else item) // shards(spec)


def checkpoint_bytes(spec: RunSpec, *, page_locked: bool = False) -> int:
    """Return the bytes of a rank's part of a checkpoint: weights without gradients; adapters are not counted.

    Args:
        spec: The run's settings.
        page_locked: Those of its copy on the host of a GPU, where torch's allocator takes a power of two of bytes for
            each tensor.
    """
    if spec.train.lora is not None:
        return 0
    item = FLOAT32 if spec.train.master_weights else ITEM_SIZES[spec.student.dtype]
    sizes = [-(-count * item // shards(spec)) for count in weight_counts(spec.student.model)]
    sizes = [1 << (size - 1).bit_length() for size in sizes] if page_locked else sizes
    return (COPIES - 1 - FEWER[spec.train.optimizer]) * sum(sizes)


def shards(spec: RunSpec) -> int:
    """Return the number of ranks that one student is sharded over; 1 without sharding."""
    return spec.workers.nodes * spec.workers.ranks if spec.train.parallel == "fsdp" else 1


def step_bytes(run: ResolvedRun, *, on_gpu: bool) -> int:
    """Return the bytes of a micro-batch in a trainer: activations, both sides' logits, and what the loss makes of them.

    Activations are those of `ModelSizes.per_layer` for each layer, or with checkpointing its input and one layer's. A
    head that is multiplied block by block has logits of one block. Its gradient is the largest one that is there in the
    student's dtype before it is added to a float32 master's.
    """
    spec, tokens = run.spec, run.spec.train.micro_batch_tokens
    student, item = ModelSizes.of(spec.student.model), ITEM_SIZES[spec.student.dtype]
    layer = round(student.per_layer(item) * (COMPILED if spec.student.compile else 1))
    layers = student.layers * layer
    if spec.student.checkpoint_activations:
        layers = student.layers * student.hidden + layer
    blockwise = spec.student.blockwise_head
    rows = min(tokens, BLOCK_ROWS) if blockwise else tokens
    logits = rows * student.vocabulary * item * (GPU_COPIES if on_gpu else CPU_COPIES)
    others = max((_teacher_logits(run, number, on_gpu=on_gpu) for number in range(len(spec.teacher))), default=0)
    masters = spec.train.master_weights and item < FLOAT32 and spec.train.lora is None
    head = student.vocabulary * student.hidden * item if masters else 0
    return tokens * layers * item + logits + others + head


def _teacher_logits(run: ResolvedRun, number: int, *, on_gpu: bool) -> int:
    """Return the bytes that a trainer takes beside a slot for a teacher's logits; teachers are compared in turn."""
    spec, teacher, content = run.spec, run.spec.teacher[number], run.spec.content_of(number)
    tokens, width = spec.train.micro_batch_tokens, run.teachers[number].head_width * ITEM_SIZES[teacher.dtype]
    block = min(tokens, BLOCK_ROWS)
    if on_gpu:  # kernels read the slot; from hidden states logits are made block by block
        copied = run.same_tokenizer[number] and content == "logits"
        return width * (block if content == "hidden" else tokens if copied else 0)
    if content == "topk":  # they are spread over the student's
        width = ModelSizes.of(spec.student.model).vocabulary * ITEM_SIZES[spec.student.dtype]
    return width * (TEACHER_COPIES_BLOCKWISE * block if spec.student.blockwise_head else TEACHER_COPIES * tokens)


def forward_bytes(run: ResolvedRun, number: int, *, rings: bool, on_gpu: bool) -> int:
    """Return the bytes of a micro-batch in a teacher: one layer's values, and logits that are not made in a slot.

    Args:
        run: The run.
        number: Number of the teacher.
        rings: As of `all_uses`.
        on_gpu: Likewise.
    """
    teacher, tokens = run.spec.teacher[number], run.spec.train.micro_batch_tokens
    if not teacher.loads_model:
        return 0
    model, content = ModelSizes.of(teacher.model), run.spec.content_of(number)
    rows = tokens * (SORTED_COPIES if content == "topk" else 1)
    if on_gpu and content == "topk":
        rows = PIECES * min(tokens, PIECE_TOKENS)
    elif on_gpu and (rings or content == "hidden"):  # of hidden states only maxima of columns are looked for
        rows = min(tokens, PIECE_TOKENS) if ring_shape(run, number).max_rows else 0
    rows = max(rows, ADJUSTED_COPIES * tokens if model.adjusted else 0)
    return (tokens * (4 * model.hidden + 3 * model.inner) + rows * model.vocabulary) * ITEM_SIZES[teacher.dtype]


def all_uses(run: ResolvedRun, *, rings: bool, on_gpu: bool = True) -> Iterator[MemoryUse]:
    """Yield the memory that a node group's processes take, part by part.

    Args:
        run: The run.
        rings: The teachers' rings are on their GPUs.
        on_gpu: Models are on GPUs.
    """
    spec = run.spec
    for rank in range(spec.workers.ranks):
        of_rank = f" of rank {rank}" if spec.workers.ranks > 1 else ""
        name = f"trainer-{rank}"
        yield MemoryUse(f"the student's state{of_rank}", student_bytes(spec), name, gpu=rank)
        yield MemoryUse(f"a micro-batch{of_rank}", step_bytes(run, on_gpu=on_gpu), name, gpu=rank, stays=False)
        yield MemoryUse(STAGED, checkpoint_bytes(spec, page_locked=on_gpu), name, Where.HOST)
        if on_gpu and not rank:  # safetensors copies all to the host before it writes
            exported = weight_bytes(spec.student.model, spec.student.dtype)
            yield MemoryUse("the weights that are exported", exported, name, Where.HOST, stays=False)
        for number in range(len(spec.teacher)):
            yield from _of_teacher(run, number, rank, of_rank, rings=rings, on_gpu=on_gpu)
        for number in spec.sync_decays:
            what = f"the average of the weights for {spec.teacher_name(number)}{of_rank}"
            average = weight_bytes(spec.student.model, "float32") // shards(spec)
            yield MemoryUse(what, average, name, gpu=rank)
            yield MemoryUse(f"{what}, for checkpoints", average, name, Where.HOST)
            if rank == 0:
                published = f"the published weights for {spec.teacher_name(number)}"
                yield from _published(spec, published, on_device=on_gpu)
    yield from _rollout_uses(spec, on_gpu=on_gpu)
    yield from _process_uses(run, on_gpu=on_gpu)


def _of_teacher(
    run: ResolvedRun, number: int, rank: int, of_rank: str, *, rings: bool, on_gpu: bool
) -> Iterator[MemoryUse]:
    spec, teacher, name = run.spec, run.spec.teacher[number], run.spec.teacher_name(number)
    process, first = f"teacher-{number}-{rank}", teacher.gpu_index(rank, 0)
    for part in range(teacher.gpus if teacher.loads_model else 0):
        gpu, weights = teacher.gpu_index(rank, part), teacher_bytes(teacher) // teacher.gpus
        yield MemoryUse(f"{name}'s weights{of_rank}", weights, process, gpu=gpu)
        forward = forward_bytes(run, number, rings=rings, on_gpu=on_gpu) // teacher.gpus
        yield MemoryUse(f"{name}'s micro-batch{of_rank}", forward, process, gpu=gpu, stays=False)
    shape = ring_shape(run, number)
    if rings and not spec.fills_on_host(number):
        yield MemoryUse(f"its signal's {shape.slots} slots", shape.memory_bytes, process, gpu=first)
    else:
        what = f"{name}'s signal in {shape.slots} slots"
        yield MemoryUse(what, shape.memory_bytes, process, Where.SHARED)


def _rollout_uses(spec: RunSpec, *, on_gpu: bool) -> Iterator[MemoryUse]:
    """Yield the weights that rank 0 publishes, and those that rollout workers have, with keys and values.

    These are of a block's rows, as long as the context. On a GPU they are there twice: the prompts' as the model has
    them, and all in the memory that graphs use.
    """
    rollout = spec.rollout
    if rollout is None:
        return
    if rollout.weights != "directory":
        on_device = on_gpu and rollout.weights == "auto" and rollout.loads_model
        yield from _published(spec, "the published weights", on_device=on_device)
    weights = weight_bytes(spec.student.model, spec.student.dtype)
    if rollout.url_weights == "nccl":
        yield MemoryUse("the weights to send", weights, "rollout-0", Where.HOST)
    model, item = ModelSizes.of(spec.student.model), ITEM_SIZES[spec.student.dtype]
    cache = spec.block_size * spec.student.context_length * model.layers * 2 * model.keys * item
    for number in range(rollout.workers if rollout.loads_model else 0):
        gpu, name, what = spec.rollout_gpu(number), f"rollout-{number}", f"rollout worker {number}'s"
        yield MemoryUse(f"{what} weights", weights, name, gpu=gpu)
        if not rollout.url:
            yield MemoryUse(f"{what} keys and values", cache * (1 + on_gpu), name, gpu=gpu, stays=False)


def _published(spec: RunSpec, what: str, *, on_device: bool) -> Iterator[MemoryUse]:
    """Yield published weights.

    Of a sharded student, or without the bindings, they are on the host: there a version is written beside the last one.
    """
    weights = weight_bytes(spec.student.model, spec.student.dtype)
    on_device = on_device and shards(spec) == 1 and has_bindings()
    yield MemoryUse(what, weights, "trainer-0", Where.DEVICE if on_device else Where.SHARED)
    if not on_device:
        yield MemoryUse(f"{what}, while they are replaced", weights, "trainer-0", Where.SHARED, stays=False)


def _process_uses(run: ResolvedRun, *, on_gpu: bool) -> Iterator[MemoryUse]:
    """Yield what every process takes before it has read a model."""
    spec = run.spec
    models = [(f"trainer-{rank}", rank) for rank in range(spec.workers.ranks)]
    for number, rank in product(range(len(spec.teacher)), range(spec.workers.ranks)):
        models.append((f"teacher-{number}-{rank}", spec.teacher[number].gpu_index(rank, 0)))
    if spec.rollout is not None:
        models += [(f"rollout-{number}", spec.rollout_gpu(number)) for number in range(spec.rollout.workers)]
    kinds = {"supervisor": "supervisor", "queue": "queue"}
    kinds |= {f"collator-{number}": "collator" for number in range(spec.workers.collators if spec.has_text else 0)}
    kinds |= {name: "trainer" if name.startswith("trainer") else "model" for name, _ in models}
    files = {side.tokenizer_dir / "tokenizer.json" for side in (spec.student, *spec.teacher)}
    read = TOKENIZER_BYTES * sum(file.stat().st_size for file in files if file.is_file())
    added = {"supervisor": read, "collator": read}
    if on_gpu:
        added |= {"model": CUDA_HOST_BYTES, "trainer": CUDA_HOST_BYTES + TRAINER_BYTES}
        added["collator"] += CUDA_BUILD_BYTES
    for name, kind in kinds.items():
        nbytes = PROCESS_MIB[kind] * MIB + added.get(kind, 0)
        yield MemoryUse("Python and libraries", nbytes, name, Where.HOST, stays=False)
    for name, gpu in models if on_gpu else ():
        yield MemoryUse("CUDA's context", CONTEXT_BYTES, name, gpu=gpu, stays=False)


def has_bindings() -> bool:
    """Return whether the bindings of CUDA's runtime are installed: without, a GPU's memory is this process's alone."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def memory_uses(run: ResolvedRun, gpu: int, gpus: int, *, rings: bool) -> list[MemoryUse]:
    """Return the memory that a node group's processes take on one of its GPUs, part by part.

    Args:
        run: The run.
        gpu: Number of the GPU, from 0.
        gpus: Number of GPUs; rank r is on GPU r modulo this.
        rings: As of `all_uses`.
    """
    uses = all_uses(run, rings=rings)
    return [use for use in uses if use.where == Where.DEVICE and use.gpu % gpus == gpu]


def custom_loss_memory(run: ResolvedRun, losses: Sequence[Loss], student_vocab_size: int) -> list[MemoryUse]:
    """Return the memory of custom losses beside both sides' logits; one that does not declare it is logged.

    Teachers are compared one after the other, and the largest counts.

    Args:
        run: The run.
        losses: One per teacher.
        student_vocab_size: `V_s`.
    """
    positions = run.spec.train.micro_batch_tokens
    if run.spec.student.blockwise_head:
        positions = min(positions, BLOCK_ROWS)
    uses = []
    for loss in losses:
        if run.spec.loss.mode_of(loss.index) != "custom":
            continue
        each = loss.bytes_per_position(student_vocab_size, loss.vocab_size)
        if each is None:
            log.warning("%s declares no bytes_per_position: it may be more than the GPU has", type(loss).__name__)
        else:
            uses.append(MemoryUse(f"{type(loss).__name__} on {positions} positions", each * positions))
    return sorted(uses, key=lambda use: -use.nbytes)[:1]


def check_room(run: ResolvedRun, device: torch.device, further: Sequence[MemoryUse] = ()) -> None:
    """Refuse a run that keeps more on a GPU than the GPU has.

    Workers without a supervisor may each see other GPUs under the same number: they only log a warning.

    Args:
        run: The run.
        device: The GPU; of a CPU the host's memory was checked before the start.
        further: What a step needs beside what `memory_uses` yields.

    Raises:
        ConfigError: It needs more; the text lists the parts.
    """
    if device.type != "cuda":
        return
    import torch

    from xtoken_core.transports.cuda_ipc import TRANSPORT as CUDA_IPC
    from xtoken_core.transports.factory import pick_transport

    rings = pick_transport(run.spec.workers.transport, device) == CUDA_IPC
    total = torch.cuda.mem_get_info(device)[1]
    why = memory_shortage(run, device.index, torch.cuda.device_count(), total, rings=rings, further=further)
    if why and supervised():
        raise ConfigError(why)
    if why:
        log.warning("%s", why)


def memory_shortage(
    run: ResolvedRun, gpu: int, gpus: int, total: int, *, rings: bool, further: Sequence[MemoryUse] = ()
) -> str:
    """Return why a GPU cannot hold what a run keeps there; empty if it can.

    Args:
        run: The run.
        gpu: As for `memory_uses`.
        gpus: Likewise.
        total: The GPU's memory in bytes.
        rings: As for `memory_uses`.
        further: As for `check_room`.
    """
    uses = [*memory_uses(run, gpu, gpus, rings=rings), *further]
    holds_a_step = rings and run.spec.ring_slots > run.spec.workers.slots
    fewer = f"{FEWER_SLOTS}, " if holds_a_step else ""
    return exceeds_memory(uses, total, f"cuda:{gpu}", fewer + REMEDIES)


def exceeds_memory(uses: list[MemoryUse], total: int, where: str, remedies: str = REMEDIES) -> str:
    """Return a message if the parts that stay exceed `total` bytes together; empty if they do not."""
    kept = [use for use in uses if use.stays and use.nbytes]
    needed = sum(use.nbytes for use in kept)
    if needed <= total:
        return ""
    parts = ", ".join(f"{use.what} {use.nbytes / GIB:.2f}" for use in kept)
    return (
        f"{where} has {total / GIB:.2f} GiB, the run keeps {needed / GIB:.2f} there before any activation ({parts}): "
        f"{remedies}"
    )


def check_teacher(device: torch.device, weights: int, shape: RingShape, what: str, *, ring_on_device: bool) -> None:
    """Refuse a teacher that does not fit into the free memory of its GPU.

    Args:
        device: Device of the teacher; a CPU is not checked.
        weights: Bytes of its weights.
        shape: Shape of its ring.
        what: Name of the teacher for the error.
        ring_on_device: The ring is on the GPU too.

    Raises:
        ConfigError: It does not fit; the text has the sizes.
    """
    if device.type != "cuda":
        return
    import torch

    uses = [MemoryUse(f"{what}'s weights", weights)]
    if ring_on_device:
        uses.append(MemoryUse(f"its signal's {shape.slots} slots", shape.memory_bytes))
    if why := exceeds_memory(uses, torch.cuda.mem_get_info(device)[0], f"the free memory of {device}", REMEDIES):
        raise ConfigError(why)
