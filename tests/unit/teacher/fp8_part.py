"""A part of a divided teacher in 8 bits, on a CPU: `fp8_part.py DIRECTORY`; the first part writes the states."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from xtoken_core.config.resolved import parse_resolved_run
from xtoken_services.common.models.loading import load_model
from xtoken_services.teacher.prepare import Fp8Linear, TeacherModel
from xtoken_services.teacher.quantized import swap_linears

directory = Path(sys.argv[1])
dist.init_process_group("gloo")
run = parse_resolved_run((directory / "run.json").read_bytes(), source="a test")
model = load_model(run.spec.teacher[0], "teacher", torch.device("cpu"), gpus=2)
assert swap_linears(model.base_model, Fp8Linear) == 2 * 7
with torch.inference_mode():
    states = TeacherModel(model, longest=32).hidden(torch.arange(3 * 24).view(3, 24) % 96)
if dist.get_rank() == 0:
    save_file({"states": states}, directory / "states.safetensors")
dist.destroy_process_group()
