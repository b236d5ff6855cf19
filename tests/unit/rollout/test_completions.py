"""Rows of completions: the ids as sampled, the completion alone aligned and counted, no target of cross-entropy."""

import copy
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.vocabularies import byte_level, fast, tekken, unigram
from xtoken_core import schema
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.collate import CollatedRows
from xtoken_core.collate_generated import Completion, CompletionCollator
from xtoken_core.config.eval import EvalSpec, TasksSpec
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.resolved import ResolvedModel, ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import DataIndex
from xtoken_core.errors import InputError
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher
from xtoken_core.losses.cross_entropy import mean_over_tokens
from xtoken_core.losses.masks import loss_counts
from xtoken_core.tokenizing import ConversationError, TextTokenizer
from xtoken_core.wire.messages import Block
from xtoken_services.common.batches.padding import padded_batch
from xtoken_services.common.generation.published_weights import Version
from xtoken_services.common.generation.sampling import Sampled
from xtoken_services.common.generation.vocabulary import Vocabulary
from xtoken_services.common.text.collation import marks_of_text
from xtoken_services.rollout.main import RolloutLoop

STUDENT, TEACHER = tekken(2000), tekken(8000)
PROMPT, TEXT = "The quick brown", " fox jumps over"


def values(rows: CollatedRows, name: str) -> np.ndarray:
    column = rows.columns[name]
    return np.frombuffer(column.values, dtype=column.dtype)


def collator_of(student: Any = STUDENT, *, teacher: Any = TEACHER, context: int = 64) -> CompletionCollator:
    return CompletionCollator(
        student_tokenizer=student, teacher_tokenizer=[teacher], aligner=[None], ctx_length_student=64,
        ctx_length_teacher=[context],
    )  # fmt: skip


def row_of(ids: list[int], *, ends: bool, context: int = 64) -> CollatedRows:
    collator = collator_of(context=context)
    prompt = collator.student.prompt({"text": PROMPT})
    completion = Completion({"text": PROMPT}, prompt, np.array(ids), TEXT, ends, ends, 5, 1.25, 10, 20)
    return collator.completion_rows([completion], loss_counts(LossConfig(mode="p_kl"), [False]))


def bytewise(text: str) -> list[int]:
    """Token ids that no tokenizer would choose: one per byte."""
    return [STUDENT(chr(byte), add_special_tokens=False)["input_ids"][0] if byte != 32 else
            STUDENT(" ", add_special_tokens=False)["input_ids"][0] for byte in text.encode()]  # fmt: skip


def test_the_students_ids_are_kept_as_sampled_and_aligned() -> None:
    sampled = bytewise(TEXT)
    rows = row_of(sampled, ends=False)
    prompt = values(rows, "input_lengths")[0] - len(sampled)
    assert values(rows, "input_ids")[prompt:].tolist() == sampled
    assert values(rows, "token_mask").tolist() == [0] * prompt + [1] * len(sampled)
    chunks = values(rows, schema.field_name(schema.STUDENT_CHUNK_ID, 0))
    assert (chunks[:prompt] == -1).all()
    assert (chunks[prompt:] >= 0).all()
    assert values(rows, schema.field_name(schema.PAIR_IS_CORRECT, 0)).all()
    assert values(rows, schema.field_name(schema.KD_CHUNKS, 0))[0] > 0
    marks = [values(rows, field.name).tolist() for field in (*schema.ROLLOUT_FIELDS, schema.CE_TOKENS)]
    assert marks == [[5], [0], [10], [20], [len(sampled)], [1250], [-1], [0]]


def test_log_probabilities_lie_at_the_sampled_tokens() -> None:
    collator = collator_of()
    prompt = collator.student.prompt({"text": PROMPT})
    ids = np.array(STUDENT(TEXT, add_special_tokens=False)["input_ids"])
    own = [-0.5 - n for n in range(len(ids))]
    completion = Completion({"text": PROMPT}, prompt, ids, TEXT, False, False, 5, log_probs=own)
    rows = collator.completion_rows([completion], loss_counts(LossConfig(), [False]))
    assert values(rows, "sampled_log_probs").tolist() == [0.0] * len(prompt) + own


def test_only_a_completion_that_ended_has_an_end_on_both_sides() -> None:
    sampled = STUDENT(TEXT, add_special_tokens=False)["input_ids"]
    cut, ended = row_of(sampled, ends=False), row_of([*sampled, STUDENT.eos_token_id], ends=True)
    teacher = schema.field_name(schema.TEACHER_INPUT_IDS, 0)
    assert values(cut, teacher)[-1] != TEACHER.eos_token_id
    assert values(ended, teacher)[-1] == TEACHER.eos_token_id
    counts = [values(row, schema.field_name(schema.KD_CHUNKS, 0))[0] for row in (cut, ended)]
    assert counts[1] == counts[0] + 1


def test_generated_rows_have_no_part_in_the_cross_entropy() -> None:
    batch = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "token_mask": torch.ones(2, 3, dtype=torch.int64),
        "sample_mask": torch.ones(2),
        "weights_version": torch.tensor([-1, 4]),
    }
    losses = torch.tensor([[1.0, 2.0, 9.0], [5.0, 7.0, 9.0]])
    torch.testing.assert_close(mean_over_tokens(batch, losses, losses > 0).loss, torch.tensor(1.5))
    packed = {
        **batch, "input_ids": batch["input_ids"].view(1, 6), "token_mask": batch["token_mask"].view(1, 6),
        "packed_sample": torch.tensor([[0, 0, 0, 1, 1, 1]]),
    }  # fmt: skip
    torch.testing.assert_close(
        mean_over_tokens(packed, losses.view(1, 6), losses.view(1, 6) > 0).loss, torch.tensor(1.5)
    )


def templated_student() -> tuple[Any, CompletionCollator]:
    """Return a student's tokenizer with a chat template, and a collator whose teacher has none."""
    templated = fast(STUDENT.backend_tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    templated.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    collator = collator_of(templated)
    return templated, collator


@pytest.mark.parametrize("turn_end", ["<end_of_turn>", "{{ eos_token }}"])
def test_a_teacher_that_ends_answers_otherwise_than_texts_does_not_teach_to_write_on(turn_end: str) -> None:
    """Both sides are certain that the answer ends, each by its template's token: that must not cost the student."""
    student, teacher = (copy.deepcopy(make()) for make in (byte_level, unigram))
    teacher.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    for side, end in ((student, "{{ eos_token }}"), (teacher, turn_end)):
        side.chat_template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
    collator = collator_of(student, teacher=teacher)
    prompt = {"messages": [{"role": "user", "content": "one"}]}
    ids = np.r_[collator.student.encode(["the lazy dog"], specials=False)[0], student.eos_token_id]
    own = Completion(prompt, collator.student.prompt(prompt), ids, "the lazy dog", True, True, 5)
    config = LossConfig(beta=0.5, kl_loss_weight_end=None)
    rows = collator.completion_rows([own], loss_counts(config, [False]))
    batch = padded_batch(rows.columns, widths=(0, 0), pad_ids=(0, 0))
    tables = as_tensors(build_tables(student, teacher))
    sizes = len(tables.student.root), len(tables.teacher.root)
    certain = []
    last = student.eos_token_id, teacher.convert_tokens_to_ids(turn_end.replace("{{ eos_token }}", teacher.eos_token))
    for column, size, end in zip(("input_ids", "teacher_0_input_ids"), sizes, last, strict=True):
        following = torch.cat([batch[column][0, 1:-1], torch.tensor([end, 0])])
        certain.append(9.0 * torch.nn.functional.one_hot(following, size).double().unsqueeze(0))
    certain[0].requires_grad_()
    loss = CrossTokenizerDistillationLoss(
        config, student_vocab_size=sizes[0], teachers=[LossTeacher(sizes[1], tables=tables)]
    )
    loss(batch, certain[0], [certain[1]])[0].backward()
    assert certain[0].grad is not None
    slope = float(certain[0].grad[0, -2, student.eos_token_id])
    assert slope == 0 if turn_end == "<end_of_turn>" else slope < 0


def test_a_prompt_that_a_chat_template_does_not_take_is_refused() -> None:
    templated, collator = templated_student()
    prompt = {"messages": [{"role": "user", "content": "1+1"}]}
    ids = collator.student.prompt(prompt)
    assert templated.decode(ids) == "1+1:"
    rows = collator.completion_rows(
        [Completion(prompt, ids, ids, "2", ends=False, finished=False, version=0)],
        loss_counts(LossConfig(mode="p_kl"), [False]),
    )
    assert rows.records == []
    assert "has no chat template" in rows.refused[0]


def test_a_completion_that_a_teacher_has_no_token_for_is_refused() -> None:
    collator = collator_of(teacher=unigram(byte_fallback=False, unknown=False))
    completions = [
        Completion({"text": "hello"}, *[np.array(STUDENT.encode(t)) for t in ("hello", text)], text, False, False, 0)
        for text in (" there", " Ω")
    ]
    rows = collator.completion_rows(completions, loss_counts(LossConfig(mode="p_kl"), [False]))
    assert rows.records == [0]
    assert rows.refused.keys() == {1}
    assert "in its completion, the teacher's tokenizer has no token for 'Ω'" in rows.refused[1]


class OneCompletion:
    """A sampler whose every completion is the same token."""

    vocabulary = Vocabulary([b"a"] * len(STUDENT), torch.ones(len(STUDENT), dtype=torch.bool), frozenset(), 0)

    def complete(self, prompts: list[Any], seeds: list[int], progress: Any) -> list[Sampled]:
        return [Sampled([5]) for _ in prompts]


def loop_over(data: Path, collator: CompletionCollator, queue: Any, **settings: Any) -> RolloutLoop:
    """A worker's loop over two records, whose weights are there."""
    model = {"model": "/no/model", "context_length": 64}
    spec = RunSpec.model_validate({
        "output": data.parent, "student": model, "teacher": model, "loss": {"mode": "alm"},
        "data": {"path": data, **settings}, "rollout": {"max_new_tokens": 4}, "train": {"samples_per_step": 2},
    })  # fmt: skip
    files = [ResolvedModel(vocab_size=8, head_width=8, tokenizer_fingerprint=name) for name in "st"]
    run = ResolvedRun(
        spec=spec, student=files[0], teachers=(files[1],), projection_fingerprints=("",), data_fingerprint="d",
        records=2, positions=2,
    )  # fmt: skip
    client = SimpleNamespace(stats=lambda: {"sessions": []})
    worker: Any = SimpleNamespace(run=run, queue=queue, client=client, alive=lambda *_: None)
    sampler: Any = OneCompletion()
    index = DataIndex.build([data], field="text", cache_dir=data.parent / "cache")
    loop = RolloutLoop(worker, sampler, collator, index)
    loop._load = lambda block: Version(0, 1)  # type: ignore[method-assign]
    return loop


@pytest.mark.parametrize("on_bad_record", ["fail", "skip"])
def test_a_prompt_that_only_a_teacher_refuses_is_a_bad_record(tmp_path: Path, on_bad_record: str) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(2 * '{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n')
    _, collator = templated_student()
    ended: list[str] = []
    put: list[dict[int, str]] = []
    queue = SimpleNamespace(give_up=ended.append, put_block=lambda lease, ids, columns, short: put.append(short))
    loop = loop_over(data, collator, queue, on_bad_record=on_bad_record, shuffle=False)
    block = Block(lease=1, first=0, count=2)
    reason = f"{data}:1: the teacher's tokenizer has no chat template"
    if on_bad_record == "fail":
        with pytest.raises(InputError, match=re.escape(reason)):
            loop._complete(block)
        assert ended[0].startswith(f"bad record at position 0: {reason}") and not put
        assert 'with "skip" such records are left out' in ended[0]
    else:
        loop._complete(block)
        assert put[0][0].startswith(reason) and list(put[0]) == [0, 1] and not ended


def test_a_completion_that_no_teacher_can_read_ends_no_run(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"text": "hello"}\n{"text": "Ω"}\n')
    put: list[dict[int, str]] = []
    queue = SimpleNamespace(give_up=lambda reason: None, put_block=lambda lease, ids, columns, short: put.append(short))
    collator = collator_of(teacher=unigram(byte_fallback=False, unknown=False))
    loop = loop_over(data, collator, queue, on_bad_record="fail", shuffle=False)
    loop.vocabulary = replace(loop.vocabulary, pieces=["Ω".encode()] * len(STUDENT))
    loop._complete(Block(lease=1, first=0, count=1))
    assert list(put[0]) == [0] and "prompts.jsonl:1: in its completion, " in put[0][0]
    with pytest.raises(
        InputError, match=r"bad record at position 1: .*prompts.jsonl:2: the teacher's tokenizer has no"
    ):
        loop._complete(Block(lease=1, first=1, count=1))


def test_a_completion_has_its_part_of_the_time_of_its_block_and_of_the_wait_before(tmp_path: Path) -> None:
    data = tmp_path / "text.jsonl"
    data.write_text(2 * '{"text": "a"}\n')
    put: dict[str, Any] = {}
    queue = SimpleNamespace(put_block=lambda lease, ids, columns, short: put.update(columns))
    loop = loop_over(data, collator_of(), queue)
    waited, began = 600.0, time.monotonic()
    loop._idle_since -= waited
    loop._complete(Block(lease=1, first=0, count=2))
    took = 1e6 * (time.monotonic() - began)
    rows = CollatedRows([0, 1], put, {})
    assert sum(values(rows, schema.GENERATION_TIME.name)) <= took
    assert 0 <= sum(values(rows, schema.WAITING_TIME.name)) - 1e6 * waited <= took + 1e6


@pytest.mark.parametrize(
    ("record", "match", "right"),
    [
        ({"text": "a", "answer": "a"}, "exact", 1), ({"text": "a", "answer": ["b", "c"]}, "exact", 0),
        ({"prompt": "a", "completion": "b", "answer": "A", "match": "contains"}, "exact", 1),
        ({"text": "a", "answer": 0}, "number", 0), ({"text": "a"}, "exact", -1),
        ({"text": "a", "answer": {"no": "answer"}}, "exact", -1), ({"text": "a", "answer": "a"}, "number", -1),
        ({"text": "a", "tests": "assert True", "match": "code"}, "exact", -1),
        ({"text": "a", "answer": "a"}, "code", -1), ({"text": "a", "answer": "a", "tests": "assert True"}, "code", -1),
    ],
)  # fmt: skip
def test_a_completion_is_judged_by_its_records_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record: dict[str, Any], match: Any, right: int
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(2 * (json.dumps(record) + "\n"))
    put: dict[str, Any] = {}
    queue = SimpleNamespace(put_block=lambda lease, ids, columns, short: put.update(columns))
    loop = loop_over(data, collator_of(), queue)
    spec = loop.run.spec.model_copy(update={"eval": EvalSpec(tasks=TasksSpec(path=data, match=match))})
    loop.run = loop.run.model_copy(update={"spec": spec})
    loop._complete(Block(lease=1, first=0, count=2))
    assert values(CollatedRows([0, 1], put, {}), "completion_right").tolist() == [right] * 2
    assert caplog.text.count("completion_accuracy") == ("answer" in record and right < 0), "once for all records"


def test_given_text_among_completions_has_no_answer() -> None:
    marks = marks_of_text(2)
    assert {name: column.tolist() for name, column in marks.items() if column.any()} == {
        "weights_version": [-1, -1], "completion_right": [-1, -1],
    }  # fmt: skip
    assert marks["finished"].dtype == torch.bool and marks["entropy_millinats"].dtype == torch.int64


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
THOUGHT = {"role": "assistant", "content": "so", "reasoning_content": "one and one"}


@pytest.mark.parametrize(("message", "shown"), [(CALL, "add"), (THOUGHT, "one and one")], ids=["call", "thought"])
def test_calls_and_thoughts_of_a_prompt_are_kept_or_refused(message: dict[str, Any], shown: str) -> None:
    templated = fast(STUDENT.backend_tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    side = TextTokenizer(templated, "student")
    prompt = {"messages": [{"role": "user", "content": "1+1"}, message, {"role": "user", "content": "again"}]}
    templated.chat_template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
        "{{ m['reasoning_content'] or '' }}{{ m.content }}{% endfor %}"
    )
    assert shown in templated.decode(side.prompt(prompt))
    templated.chat_template = "{% if enable_thinking %}.{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    (part,) = message.keys() - {"role", "content"}
    with pytest.raises(ConversationError, match=f"the student's chat template does not show `{part}` of a message"):
        side.prompt(prompt)
    with pytest.raises(ConversationError, match=part):
        side.render(prompt["messages"])
