"""What a run keeps on its GPUs, counted before anything is loaded."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import resolved_run, revised_run
from tests.unit.trainer.students import make_model, nll, tokens
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError
from xtoken_core.losses.base import ChunkLoss
from xtoken_core.losses.common import LossTeacher
from xtoken_core.transports.ring import RingShape
from xtoken_core.wire.columns import ITEM_SIZES
from xtoken_services.common.batches.step_plan import ring_shape
from xtoken_services.common.processes.supervised import MARK
from xtoken_services.common.run import memory_estimate, memory_places
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.memory_estimate import (
    FLOAT32,
    GIB,
    TOKENIZER_BYTES,
    MemoryUse,
    ModelSizes,
    Where,
    all_uses,
    check_room,
    check_teacher,
    checkpoint_bytes,
    custom_loss_memory,
    exceeds_memory,
    forward_bytes,
    memory_shortage,
    memory_uses,
    student_bytes,
    weight_bytes,
)
from xtoken_services.common.run.memory_places import places_of
from xtoken_services.common.run.start_checks import check_host
from xtoken_services.trainer.optimizer import StudentOptimizer
from xtoken_services.trainer.student import Student


def with_models(directory: Path, *, teachers: int = 1, **changes: Any) -> ResolvedRun:
    """A run whose models are there; `changes` are tables of its settings."""
    run = resolved_run(directory, teachers=teachers)
    make_model().save_pretrained(run.spec.student.model)
    for teacher in run.spec.teacher:
        make_model().save_pretrained(teacher.model)
    return revised_run(run, **changes)


@pytest.mark.parametrize(
    ("dtype", "master_weights"), [("float32", True), ("bfloat16", True), ("bfloat16", False)], ids=str
)
def test_a_student_keeps_what_was_counted(tmp_path: Path, dtype: str, master_weights: bool) -> None:
    run = with_models(tmp_path, student={"dtype": dtype}, train={"master_weights": master_weights})
    model = make_model() if master_weights else make_model().to(getattr(torch, dtype))
    student = Student(model, run.spec)
    optimizer = StudentOptimizer(student, run.spec.train, 4)
    ids = tokens()
    nll(student.outputs(ids), ids).backward()
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in (*student.model.parameters(), *student.trainable.values())}
    kept |= {w.grad.data_ptr(): w.grad.nbytes for w in student.trainable.values() if w.grad is not None}
    moments = [m for name, m in optimizer.state().items() if name.rpartition(".")[2].startswith("exp_avg")]
    assert student_bytes(run.spec) == sum(kept.values()) + sum(moment.nbytes for moment in moments)
    steps = FLOAT32 * len(student.trainable)  # that each weight has taken
    assert checkpoint_bytes(run.spec) + steps == sum(value.nbytes for value in optimizer.state().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_keep_for_the_backward_what_was_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    model.save_pretrained(tmp_path)
    weights = {weight.data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept.setdefault(memory.data_ptr(), tensor)
        return tensor

    ids = tokens()
    sizes: list[int] = []
    for layers in (model.model.layers[:1], model.model.layers[:2]):  # their difference is one layer
        model.model.layers, kept = layers, {}
        model.config.num_hidden_layers = len(layers)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(ids, use_cache=False)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    counted = ModelSizes.of(tmp_path).per_layer(dtype.itemsize) * ids.numel() * dtype.itemsize
    assert (sizes[1] - sizes[0]) / counted == pytest.approx(1, abs=0.06)


def test_an_export_from_a_gpu_has_the_weights_on_the_host(tmp_path: Path) -> None:
    run = with_models(tmp_path, workers={"ranks": 2})
    for on_gpu, expected in ((False, []), (True, [("trainer-0", weight_bytes(run.spec.student.model, "float32"))])):
        uses = all_uses(run, rings=False, on_gpu=on_gpu)
        assert [(use.process, use.nbytes) for use in uses if use.what == "the weights that are exported"] == expected


def test_a_copy_for_checkpoints_is_page_locked_in_powers_of_two(tmp_path: Path) -> None:
    run = with_models(tmp_path, student={"dtype": "bfloat16"})
    sizes = [weight.numel() * FLOAT32 for weight in make_model().parameters()]
    rounded = sum(1 << (size - 1).bit_length() for size in sizes)
    assert checkpoint_bytes(run.spec, page_locked=True) == 3 * rounded > checkpoint_bytes(run.spec)


def test_a_teachers_logits_are_counted_once_and_in_pieces_where_it_makes_pieces(tmp_path: Path) -> None:
    run = with_models(tmp_path, train={"micro_batch_tokens": 1 << 14})
    body = forward_bytes(run, 0, rings=True, on_gpu=True)

    def rows(run: ResolvedRun, *, rings: bool, on_gpu: bool) -> int:
        logits = forward_bytes(run, 0, rings=rings, on_gpu=on_gpu) - body
        return logits // (FLOAT32 * ModelSizes.of(run.spec.teacher[0].model).vocabulary)

    assert rows(run, rings=False, on_gpu=True) == rows(run, rings=False, on_gpu=False) == 1 << 14
    (teacher,) = [teacher.model_dump(mode="json") for teacher in run.spec.teacher]
    largest = with_models(tmp_path, train={"micro_batch_tokens": 1 << 14}, teacher=[teacher | {"content": "topk"}])
    assert (rows(largest, rings=True, on_gpu=True), rows(largest, rings=False, on_gpu=False)) == (2048, 4 << 14)
    file = Path(teacher["model"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"final_logit_softcapping": 30.0, "logit_scale": 1.0}))
    assert [rows(run, rings=True, on_gpu=on_gpu) for on_gpu in (True, False)] == [2 << 14, 2 << 14], "made whole"


def test_large_tokenizers_are_counted_where_they_are_read(tmp_path: Path) -> None:
    run = with_models(tmp_path)
    sides = [run.spec.student, run.spec.teacher[0]]
    sizes: list[dict[str, int]] = []
    for size in (0, 1 << 20):
        for side in sides:
            side.tokenizer_dir.mkdir(exist_ok=True)
            (side.tokenizer_dir / "tokenizer.json").write_bytes(b" " * size)
        libraries = (use for use in all_uses(run, rings=False) if use.what == "Python and libraries")
        sizes.append({use.process: use.nbytes for use in libraries})
    files = len({side.tokenizer_dir for side in sides})
    grown = {name: nbytes - sizes[0][name] for name, nbytes in sizes[1].items() if nbytes > sizes[0][name]}
    assert grown == dict.fromkeys(("supervisor", "collator-0", "collator-1"), TOKENIZER_BYTES * files << 20)


def test_ranks_share_a_student_and_adapters_need_none_of_it(tmp_path: Path) -> None:
    run = with_models(tmp_path, student={"dtype": "bfloat16"})
    weights = weight_bytes(run.spec.student.model, "bfloat16")
    two = with_models(tmp_path, student={"dtype": "bfloat16"}, train={"parallel": "fsdp"}, workers={"ranks": 2})
    assert student_bytes(run.spec) == 9 * weights
    assert student_bytes(two.spec) == 8 * weights // 2
    lora = with_models(tmp_path, student={"dtype": "bfloat16"}, train={"lora": {"rank": 4}})
    assert student_bytes(lora.spec) == weights


def staying(run: ResolvedRun, gpu: int, gpus: int, **settings: Any) -> list[MemoryUse]:
    """What stays on a GPU between micro-batches."""
    return [use for use in memory_uses(run, gpu, gpus, **settings) if use.stays]


def test_each_gpu_holds_its_ranks_and_the_teachers_that_are_put_there(tmp_path: Path) -> None:
    run = with_models(tmp_path, teachers=2, workers={"ranks": 2})
    teachers = [teacher.model_dump(mode="json") for teacher in run.spec.teacher]
    teachers[1] |= {"gpu": 1}
    run = with_models(tmp_path, teachers=2, workers={"ranks": 2}, teacher=teachers)
    found = [[need.what for need in staying(run, gpu, 2, rings=False)] for gpu in (0, 1)]
    assert found == [
        ["the student's state of rank 0", "teacher 0's weights of rank 0", "teacher 1's weights of rank 1"],
        ["teacher 1's weights of rank 0", "the student's state of rank 1", "teacher 0's weights of rank 1"],
    ]
    alone = staying(run, 0, 1, rings=True)
    assert len(alone) == 2 * (1 + 2 * 2), "one GPU holds all of both ranks"
    assert alone[2] == MemoryUse("its signal's 2 slots", ring_shape(run, 0).memory_bytes, "teacher-0-0")


def test_a_stored_teacher_takes_a_gpu_only_for_a_ring_that_must_be_there(tmp_path: Path) -> None:
    (teacher,) = with_models(tmp_path).spec.teacher
    stored = [teacher.model_dump(mode="json") | {"content": "topk", "store": "s"}]
    for transport, kept in (("auto", []), ("cuda_ipc", ["its signal's 2 slots"])):
        run = with_models(tmp_path, teacher=stored, workers={"transport": transport})
        assert [need.what for need in staying(run, 0, 1, rings=True)] == ["the student's state", *kept]


def test_a_rollout_worker_has_the_students_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "has_bindings", lambda: True)
    settings = {"workers": 3, "max_new_tokens": 2}
    run = with_models(tmp_path, rollout=settings, loss={"kl_loss_weight_end": None})
    alone = {need.what for need in memory_uses(with_models(tmp_path), 0, 2, rings=False)}
    added = [need for need in staying(run, 0, 2, rings=False) if need.what not in alone]
    weights = weight_bytes(run.spec.student.model, run.spec.student.dtype)
    second = MemoryUse("rollout worker 1's weights", weights, "rollout-1", gpu=2)  # the others are on the GPU beside
    assert added == [MemoryUse("the published weights", weights, "trainer-0"), second]
    model, item = ModelSizes.of(run.spec.student.model), ITEM_SIZES[run.spec.student.dtype]
    row = run.spec.student.context_length * model.layers * 2 * model.keys * item
    for on_gpu, copies in ((False, 1), (True, 2)):
        uses = all_uses(run, rings=False, on_gpu=on_gpu)
        caches = [use.nbytes for use in uses if use.what.endswith("keys and values")]
        assert caches == 3 * [copies * run.spec.block_size * row]
    served = {"url": "http://a:1", "max_new_tokens": 2}
    # On the device, in shared memory (a version beside the one that it replaces), on the host.
    places, names = (Where.DEVICE, Where.SHARED, Where.HOST), ("the published weights", "the weights to", "rollout wo")
    for by, bindings, taken in (
        ("directory", True, (0, 2, 0)), ("ipc", True, (2, 0, 0)), ("ipc", False, (1, 2, 0)), ("nccl", True, (0, 2, 1)),
    ):  # fmt: skip
        monkeypatch.setattr(memory_estimate, "has_bindings", partial(bool, bindings))
        run = with_models(tmp_path, rollout=served | {"url_weights": by}, loss={"kl_loss_weight_end": None})
        needs = [need for need in all_uses(run, rings=True) if need.what.startswith(names)]
        sums = [sum(need.nbytes for need in needs if need.where == place) for place in places]
        assert sums == [count * weights for count in taken]
    with pytest.raises(ConfigError, match=r"^/dev/shm has .*published.*: lower.*; of /dev/shm, set rollout\.weights"):
        check_host(run, Machine(1, gpus=1, gpu_bytes=GIB * 64, memory_bytes=GIB * 64, shared_bytes=1))


def test_weights_that_a_teacher_follows_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "has_bindings", lambda: True)
    sharded = {"train": {"parallel": "fsdp"}, "workers": {"ranks": 2}}
    for changes, on_gpu, where, count in (
        ({}, True, Where.DEVICE, 1),
        (sharded, True, Where.SHARED, 2),
        ({}, False, Where.SHARED, 2),
    ):
        run = with_models(tmp_path, teacher=[{"model": "student", "context_length": 32, "sync": "ema"}], **changes)
        weights = weight_bytes(run.spec.student.model, run.spec.student.dtype)
        needs = [need for need in all_uses(run, rings=on_gpu, on_gpu=on_gpu) if "published" in need.what]
        assert {need.where for need in needs} == {where} and sum(need.nbytes for need in needs) == count * weights


def test_what_is_too_much_is_told_in_one_line() -> None:
    needs = [MemoryUse("the student's state", 18 * GIB), MemoryUse("teacher 0's weights", 7 * GIB)]
    assert exceeds_memory(needs, 25 * GIB, "cuda:0") == ""
    why = exceeds_memory(needs, 24 * GIB, "cuda:0")
    assert "cuda:0 has 24.00 GiB, the run keeps 25.00 there before any activation" in why
    assert "(the student's state 18.00, teacher 0's weights 7.00)" in why
    assert "teacher.gpu" in why and "\n" not in why


def test_a_custom_loss_declares_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Large(ChunkLoss):
        mode = "custom"

        @classmethod
        def bytes_per_position(cls, student_vocab_size: int, teacher_vocab_size: int) -> int:
            return student_vocab_size + 2 * teacher_vocab_size

        def evaluate(self, inputs: Any) -> Any:
            raise NotImplementedError

    class Unknown(Large):
        @classmethod
        def bytes_per_position(cls, student_vocab_size: int, teacher_vocab_size: int) -> None:
            return None

    def needs(run: ResolvedRun, loss: type[ChunkLoss]) -> list[MemoryUse]:
        teacher = LossTeacher(vocab_size=20, own_tokenizer=True)
        made = loss(run.spec.loss, teacher, index=0, student_vocab_size=10, device=torch.device("cpu"))
        return custom_loss_memory(run, [made], 10)

    own = {"loss": {"mode": "custom"}, "train": {"micro_batch_tokens": 1 << 20}}
    run = with_models(tmp_path, **own)
    assert needs(run, Large) == [MemoryUse("Large on 1048576 positions", 50 << 20)]
    in_blocks = with_models(tmp_path, **own, student={"blockwise_head": True})
    assert needs(in_blocks, Large) == [MemoryUse("Large on 2048 positions", 50 << 11)]
    kept = sum(need.nbytes for need in staying(run, 0, 1, rings=False))
    assert memory_shortage(run, 0, 1, kept, rings=False) == ""
    assert "Large on 1048576 positions 0.05" in memory_shortage(run, 0, 1, kept, rings=False, further=needs(run, Large))
    assert caplog.messages == [] and needs(run, Unknown) == []
    assert "Unknown declares no bytes_per_position" in caplog.text
    assert needs(with_models(tmp_path), Large) == [], "the library's losses are in the estimate"


def in_bfloat16(run: ResolvedRun, **changes: Any) -> list[dict[str, Any]]:
    """The settings of a run's first teacher alone, in bfloat16."""
    return [run.spec.teacher[0].model_dump(mode="json") | {"dtype": "bfloat16"} | changes]


def test_a_cpu_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_models(tmp_path)
    assert memory_shortage(run, 0, 1, 1, rings=True), "it fits no GPU of one byte"
    monkeypatch.setenv(MARK, "trainer-0")
    shape = RingShape(slots=2, slot_tokens=1 << 30, head_width=1 << 18, vocab=1 << 18, dtype="float32")
    queried: list[object] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: queried.append(args) or (0, 0))
    check_room(run, torch.device("cpu"))
    check_teacher(torch.device("cpu"), 1 << 60, shape, "teacher 0", ring_on_device=True)
    assert queried == []


@pytest.mark.gpu
def test_a_run_that_no_gpu_holds_is_refused_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = with_models(tmp_path, workers={"transport": "cuda_ipc", "slots": 64}, train={"micro_batch_tokens": 1 << 24})
    check_room(with_models(tmp_path), torch.device("cuda", 0))
    monkeypatch.delenv(MARK, raising=False)
    check_room(run, torch.device("cuda", 0))
    assert "its signal's 64 slots" in caplog.text, "started by hand: a warning"
    monkeypatch.setenv(MARK, "run/teacher-0-0/1/")
    with pytest.raises(ConfigError, match="its signal's 64 slots"):
        check_room(run, torch.device("cuda", 0))


def test_a_run_that_follows_one_of_its_teachers_is_told_what_its_slots_hold(tmp_path: Path) -> None:
    sums = with_models(tmp_path, teachers=2)
    selects = with_models(tmp_path, teachers=2, loss={"teacher_aggregation": "select_teacher"})
    tip = "lower train.samples_per_step, all of whose signals select_teacher holds at once, "
    assert f"): {tip}give teachers" in memory_shortage(selects, 0, 1, 0, rings=True)
    assert tip not in memory_shortage(sums, 0, 1, 0, rings=True) + memory_shortage(selects, 0, 1, 0, rings=False)


def test_without_bindings_the_slots_of_auto_are_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_models(tmp_path, workers={"transport": "auto", "device": "cuda"})
    machine = Machine(1, gpu_bytes=80 * GIB, memory_bytes=80 * GIB, shared_bytes=1)
    monkeypatch.setattr(memory_places, "has_bindings", lambda: True)
    assert "cuda:0" in check_host(run, machine)[-1]
    monkeypatch.setattr(memory_places, "has_bindings", lambda: False)
    with pytest.raises(ConfigError, match=r"^/dev/shm has 0\.00 GiB"):
        check_host(run, machine)


def test_node_groups_of_one_machine_have_gpus_of_their_own(tmp_path: Path) -> None:
    machine = Machine(1, gpus=3, gpu_bytes=80 * GIB)

    def on_gpus(**workers: Any) -> dict[str, int]:
        run = with_models(tmp_path, workers={"device": "cuda", **workers})
        return {place.name: place.needed for place in places_of(run, machine) if "cuda" in place.name}

    (alone,) = on_gpus().values()
    assert on_gpus(nodes=2) == {"cuda:0": alone, "cuda:1": alone}
    assert on_gpus(nodes=2, launcher="ray") == {"cuda:0": alone}, "the other one is on another machine"


def test_all_of_a_run_is_in_one_place_and_each_process_is_named(tmp_path: Path) -> None:
    run = with_models(tmp_path, teachers=2, workers={"device": "cpu", "collators": 2})
    machine = Machine(1, memory_bytes=GIB * 64, shared_bytes=GIB)
    host, shared = places_of(run, machine)
    assert sum(use.nbytes for use in all_uses(run, rings=False, on_gpu=False)) == host.needed, "a CPU run has no other"
    assert shared.needed == sum(ring_shape(run, number).memory_bytes for number in (0, 1))
    *processes, whole = check_host(run, machine)
    named = {name for line in processes for name in line.split(": ")[0].removeprefix("memory of ").split(", ")}
    workers = ["queue", "collator-0", "collator-1", "teacher-0-0", "teacher-1-0", "trainer-0"]
    assert named == {"supervisor", *workers}
    assert "of 64.00 GiB host memory (available)" in whole and "of 1.00 GiB /dev/shm" in whole


def test_what_may_be_too_much_is_a_warning_and_what_stays_or_is_far_above_is_refused(tmp_path: Path) -> None:
    run = with_models(tmp_path, workers={"device": "cpu"})
    (host, _) = places_of(run, Machine(1))
    stays = sum(use.nbytes for use in host.uses if use.stays)
    *_, warning = check_host(run, Machine(1, memory_bytes=host.needed - 1))
    assert warning.startswith("the run may need more memory than there is in host memory (available): lower")
    assert not check_host(run, Machine(1, memory_bytes=host.needed))[-1].startswith("the run may")
    most = host.needed * 2 // 3
    assert check_host(run, Machine(1, memory_bytes=most + 1))[-1].startswith("the run may")
    far = r"^the run needs about 1\..* where there is 1\.\d\d GiB of host memory \(available\) \(trainer-0: Python and "
    with pytest.raises(ConfigError, match=far + r"libraries 0\.44 GiB, .*, …\): lower"):
        check_host(run, Machine(1, memory_bytes=most - 1))
    on_gpu = with_models(tmp_path / "gpu", workers={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"0\.50 GiB of cuda:0 \(trainer-0: CUDA's context 0\.94 GiB, "):
        check_host(on_gpu, Machine(1, gpus=1, gpu_bytes=GIB >> 1))
    with pytest.raises(
        ConfigError, match=r"^host memory \(available\) has .* before any activation \(the student's state"
    ):
        check_host(run, Machine(1, memory_bytes=stays - 1))


def test_the_ring_is_on_the_device_or_in_shared_memory_never_in_both(tmp_path: Path) -> None:
    run = with_models(tmp_path)
    for rings, where in ((True, Where.DEVICE), (False, Where.SHARED)):
        assert [use.where for use in all_uses(run, rings=rings) if "signal" in use.what] == [where]
