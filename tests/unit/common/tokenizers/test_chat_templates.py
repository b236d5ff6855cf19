"""Chat templates: where they are read from, and twenty of different shapes on both sides of an alignment."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support import vocabularies as v
from tests.support.alignments import aligner_of, collator_of
from tests.support.columns import rows_of
from xtoken_core.config.spec import ModelSpec
from xtoken_core.errors import InputError
from xtoken_services.cli.align import align_app
from xtoken_services.common.tokenizers.chat_templates import read_chat_template
from xtoken_services.common.tokenizers.loading import tokenizer_of

ANSWERS = ["hello there, héllo 日本", "fine, thank you.\nAnd you?"]
CHAT = [
    {"role": "user", "content": "say hello there"},
    {"role": "assistant", "content": ANSWERS[0]},
    {"role": "user", "content": "hello there, how are you?"},
    {"role": "assistant", "content": ANSWERS[1]},
]


def loop(user: str, assistant: str, prompt: str = "", *, before: str = "", after: str = "") -> str:
    """Return a template that writes a user's and an assistant's message around `C`."""
    sides = [side.replace("C", "{{ m['content'] }}") for side in (user, assistant)]
    ending = "{% if add_generation_prompt %}" + prompt + "{% endif %}" if prompt else ""
    return (
        before + "{% for m in messages %}{% if m['role'] == 'user' %}" + sides[0] + "{% else %}" + sides[1]
        + "{% endif %}{% endfor %}" + after + ending
    )  # fmt: skip


TRIMMED = "{{ m['content'] | trim }}"
TEMPLATES = {
    "im_start": loop(
        "<|im_start|>user\nC<|im_end|>\n", "<|im_start|>assistant\nC<|im_end|>\n", "<|im_start|>assistant\n"
    ),
    "inst": loop("[INST] C [/INST]", " " + TRIMMED + "{{ eos_token }}", before="{{ bos_token }}"),
    "inst without spaces": loop("[INST]C[/INST]", "C{{ eos_token }}", before="{{ bos_token }}"),
    "header": loop(
        "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n" + TRIMMED + "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "turn": loop(
        "<start_of_turn>user\nC<end_of_turn>\n", "<start_of_turn>model\nC<end_of_turn>\n", "<start_of_turn>model\n"
    ),
    "bars": loop("<|user|>\nC</s>\n", "<|assistant|>\nC</s>\n", "<|assistant|>\n"),
    "bars, one line": loop("<|user|>C<|end|>", "<|assistant|>C<|end|>", "<|assistant|>"),
    "upper case": loop("USER: C ", "ASSISTANT: C</s>", "ASSISTANT:"),
    "headings": loop("### Instruction:\nC\n\n", "### Response:\nC\n\n", "### Response:\n"),
    "full width": loop("<｜User｜>C", "<｜Assistant｜>C<｜end▁of▁sentence｜>", "<｜Assistant｜>"),
    "turn tokens": loop(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>C<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>C<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "names": loop("User: C\n\n", "Assistant: C\n\n", "Assistant:"),
    "correct user": loop("GPT4 Correct User: C<|end_of_turn|>", "GPT4 Correct Assistant: C<|end_of_turn|>"),
    "question and answer": loop("Q: C\n", "A: C\n", "A:"),
    "xml": loop("<user>C</user>", "<assistant>C</assistant>", "<assistant>"),
    "bare": loop("C\n", "C\n"),
    "empty thought": loop("<u>C</u>", "<a><think>\n\n</think>\n\nC</a>", "<a>"),
    "system first": loop("<|u|>C", "<|a|>C", "<|a|>", before="<|s|>You are a helpful assistant, hello there.\n"),
    "ending after all": loop("[C]", "(C)", after="{{ eos_token }}"),
    "dates": loop("* C\n", "- C\n", before="Cutting Knowledge Date: December 2023\n\n"),
}


@pytest.fixture(scope="module")
def sides() -> tuple[Any, Any, Any]:
    """Return a student, a teacher, and their aligner."""
    student, teacher = v.sentencepiece_bpe("legacy"), v.byte_level(bos=True)
    return student, teacher, aligner_of(student, teacher)


@pytest.mark.parametrize("number", range(len(TEMPLATES)), ids=list(TEMPLATES))
def test_answers_are_trained_on_under_every_template(sides: tuple[Any, Any, Any], number: int) -> None:
    """Template `number` on the student's side, the next one on the teacher's."""
    student, teacher, aligner = copy.copy(sides[0]), copy.copy(sides[1]), sides[2]
    names = list(TEMPLATES)
    student.chat_template = TEMPLATES[names[number]]
    teacher.chat_template = TEMPLATES[names[(number + 1) % len(names)]]
    collator = collator_of(student, teacher, 500, 500, aligner=aligner)
    (row,) = rows_of(collator.rows([{"messages": CHAT}]).columns)
    ours = aligner.student.spell(row["input_ids"][row["token_mask"] == 1]).decode()
    theirs = aligner.teacher.spell(row["teacher_0_input_ids"][row["teacher_0_token_mask"] == 1]).decode()
    assert theirs == "".join(ANSWERS)
    assert ours.split() == " ".join(ANSWERS).split() or ours == "".join(ANSWERS)
    assert row["alignment_0_pair_is_correct"].all()
    learnt = row["token_mask"] == 1
    spells = np.array([len(aligner.student.spell([token])) > 0 for token in row["input_ids"]])  # no end of an answer
    assert (row["alignment_0_student_chunk_id"][learnt & spells] >= 0).all()
    assert (row["alignment_0_student_chunk_id"][row["token_mask"] == 0] == -1).all()


def test_template_is_read_from_a_file_or_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("a template", encoding="utf-8")
    assert read_chat_template(file) == "a template"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "of a list"}]
    for template, expected in (("a string", "a string"), (named, "of a list")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert read_chat_template(tmp_path) == expected
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert read_chat_template(tmp_path) == "a file"


def test_missing_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no chat template in"):
        read_chat_template(tmp_path)
    with pytest.raises(InputError, match=r"cannot read the chat template .*nothing\.jinja: No such file"):
        read_chat_template(tmp_path / "nothing.jinja")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match="cannot read the chat template"):
        read_chat_template(tmp_path)


def test_base_model_borrows_a_template(tmp_path: Path, sides: tuple[Any, Any, Any]) -> None:
    base, chat = tmp_path / "base", tmp_path / "chat"
    sides[1].save_pretrained(base)
    chat.mkdir()
    (chat / "chat_template.jinja").write_text(TEMPLATES["names"])
    spec = ModelSpec(model=base, chat_template=chat, context_length=64)
    rendered = tokenizer_of(spec, "teacher").apply_chat_template(CHAT[:2], tokenize=False)
    assert rendered == f"User: say hello there\n\nAssistant: {ANSWERS[0]}\n\n"
    assert tokenizer_of(spec.model_copy(update={"chat_template": None}), "teacher").chat_template is None


def test_align_check_renders_messages_as_a_run_does(tmp_path: Path, sides: tuple[Any, Any, Any]) -> None:
    student, teacher, aligner = copy.copy(sides[0]), copy.copy(sides[1]), sides[2]
    student.chat_template, teacher.chat_template = TEMPLATES["inst"], TEMPLATES["im_start"]
    student.save_pretrained(tmp_path / "student")
    teacher.save_pretrained(tmp_path / "teacher")
    file = tmp_path / "chat.jsonl"
    lines = [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": CHAT[:2]}, {"text": "hello there"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sides_given = ["--student", str(tmp_path / "student"), "--teacher", str(tmp_path / "teacher")]
    done = CliRunner().invoke(align_app, ["check", *sides_given, "--json", str(file)], catch_exceptions=False)
    total = json.loads(done.stdout)["total"]
    collator = collator_of(student, teacher, 500, 500, aligner=aligner, append_eos=False)
    rows = rows_of(collator.rows(lines).columns)
    assert (total["records"], total["skipped"], total["records_with_misfits"]) == (4, 1, 0)
    assert total["first_skipped"]["reason"] == "no assistant message that every chat template shows as it is"
    assert total["chunks"] == sum(row["alignment_0_num_chunks"] for row in rows)


def test_train_on_all_roles() -> None:
    tokenizer = copy.deepcopy(v.byte_level(400))
    tokenizer.chat_template = TEMPLATES["im_start"]
    collator = collator_of(tokenizer, [None], 400, [None], aligner=[None], train_on="all")
    records = [{"messages": CHAT}, {"prompt": "say hello", "completion": " hello"}]
    conversation, completion = rows_of(collator.rows(records).columns)
    learnt = [i for i, mask in zip(conversation["input_ids"], conversation["token_mask"], strict=True) if mask]
    assert tokenizer.decode(learnt) == "".join(f"{message['content']}<|im_end|>" for message in CHAT)
    assert all(completion["token_mask"])
