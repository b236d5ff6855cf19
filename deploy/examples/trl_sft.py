"""TRL's SFTTrainer with a teacher: `python trl_sft.py STUDENT TEACHER TEXT.txt OUT`, or by `accelerate launch`."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import xtoken
from xtoken.integrations import Distillation


class DistillationSFTTrainer(Distillation, SFTTrainer):
    """TRL's trainer with xtoken's collator and loss."""


def train(student_dir: str, teacher_dir: str, text: str, out: str, **settings: object) -> list[float]:
    """Train the student on the lines of a text, write it to `out`, and return the losses that were logged."""
    tokenizers = [AutoTokenizer.from_pretrained(directory) for directory in (student_dir, teacher_dir)]
    student, teacher = (AutoModelForCausalLM.from_pretrained(d, dtype="float32") for d in (student_dir, teacher_dir))
    lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()]
    defaults = {"max_steps": 20, "learning_rate": 1e-3, "per_device_train_batch_size": 2, "logging_steps": 1}
    defaults |= {"bf16": torch.cuda.is_available(), "use_cpu": not torch.cuda.is_available()}
    config = SFTConfig(
        out,
        gradient_accumulation_steps=2,
        dataset_kwargs={"skip_prepare_dataset": True},  # the collator tokenizes with both tokenizers
        report_to="none",
        **(defaults | settings),
    )
    trainer = DistillationSFTTrainer(
        student,
        config,
        train_dataset=Dataset.from_list([{"text": line} for line in lines]),
        pair=xtoken.TokenizerPair(*tokenizers, context_length=128, mode="alm", device=config.device),
        teacher=teacher,
    )
    trainer.train()
    trainer.save_model(out)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    train(*sys.argv[1:5])
