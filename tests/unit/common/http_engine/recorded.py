"""Requests and answers in the form that the programs' documentation shows."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[3] / "data" / "recorded_engines.json"
RECORDED: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
VLLM, SGLANG = RECORDED["vllm"], RECORDED["sglang"]
