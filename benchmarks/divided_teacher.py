"""A teacher on two GPUs beside the same one on a single GPU: `python -m benchmarks.divided_teacher`.

Random weights of Qwen3-8B's shapes. Each measurement runs in a process of its own: the teacher's own code, without
queue and ring, on packed rows of documents of one length. The states of one document are compared too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.assets import COMMON, QWEN3_4B, SMALL, make_model
from benchmarks.harness import command_line, in_process, machine, write_result

QWEN3_8B: dict[str, Any] = {**QWEN3_4B, "hidden_size": 4096, "intermediate_size": 12288}
DOCUMENT = 2048
DOCUMENTS = (4, 8, 16)
"""Documents of a row, one row after another."""
WARMUP, PASSES = 3, 10


def main() -> int:
    """Measure one GPU and two, write JSON."""
    parser = command_line(__doc__, "divided_teacher")
    parser.add_argument("--work", type=Path, default=Path("runs", "divided-teacher"))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--small", action="store_true", help="a thin model: to try the harness on a CPU")
    parser.add_argument("--quantized", choices=("fp8", "nf4"), help="format of the linear layers")
    arguments = parser.parse_args()
    in_process(make_models, arguments)  # leaves no memory of a GPU behind
    found = {str(gpus): in_process(measured, arguments, gpus) for gpus in (1, 2)}
    rates = [found[gpus]["tokens_per_second"] for gpus in ("1", "2")]
    report = {
        **machine(),
        "layers": arguments.layers,
        "document": DOCUMENT,
        "quantized": arguments.quantized,
        "gpus": found,
        "times_one": {documents: rates[1][documents] / rate for documents, rate in rates[0].items()},
        "deviation": deviation(arguments.work),
    }
    write_result(arguments.out, report)
    print(json.dumps({name: report[name] for name in ("times_one", "deviation")}), flush=True)
    return 0


def make_models(arguments: argparse.Namespace) -> None:
    """Write the teacher and a thin student, if they are not there."""
    large = {**QWEN3_8B, **COMMON, "tie_word_embeddings": False, "num_hidden_layers": arguments.layers}
    thin = {**large, **SMALL, "vocab_size": 512}
    for name, shape in (("student", thin), ("teacher", thin if arguments.small else large)):
        directory = arguments.work / name
        if not (directory / "config.json").exists():
            make_model(directory, shape, seed=0)


def measured(arguments: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Return tokens per second by documents of a row, and bytes of weights; keep the states of a document."""
    import torch
    from safetensors.torch import save_file

    from xtoken_core.packing import PackedRow
    from xtoken_services.teacher.prepare import devices_of, prepared_model
    from xtoken_services.teacher.shards import send_tokens, started_shards

    run = run_of(arguments, gpus)
    devices = devices_of(run.spec, 0, 0)
    rates: dict[str, float] = {}
    with started_shards(run, 0, devices) if len(devices) > 1 else nullcontext(), torch.inference_mode():
        model = prepared_model(run, 0, devices[0])
        model.before_forward = send_tokens if len(devices) > 1 else None
        for documents in DOCUMENTS[:1] if arguments.small else DOCUMENTS:
            row = PackedRow((DOCUMENT,) * documents, DOCUMENT * documents)
            tokens = torch.arange(row.width).unsqueeze(0) % 509
            seconds = []
            for _ in range(WARMUP + PASSES):
                began = time.perf_counter()
                states = model.hidden(tokens, row)
                if states.is_cuda:
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            rates[str(documents)] = row.width / statistics.median(seconds[WARMUP:])
        save_file({"states": states[0, :DOCUMENT].float().cpu()}, arguments.work / f"states-{gpus}.safetensors")
    return {"tokens_per_second": rates, "weight_bytes": model.nbytes}


def run_of(arguments: argparse.Namespace, gpus: int) -> Any:
    """Return a run with this teacher, as far as loading it needs one."""
    from xtoken_core.config.resolved import ResolvedModel, ResolvedRun
    from xtoken_core.config.spec import RunSpec

    work = arguments.work.absolute()
    models = {name: {"model": work / name, "context_length": DOCUMENT} for name in ("student", "teacher")}
    teacher = {**models["teacher"], "dtype": "bfloat16", "gpus": gpus, "gpu": 0, "quantized": arguments.quantized}
    tokens = DOCUMENT * max(DOCUMENTS)
    raw = {"output": work / "out", "student": models["student"], "teacher": [teacher], "data": {"path": work / "text"}}
    spec = RunSpec.model_validate({**raw, "train": {"micro_batch_tokens": tokens}})
    files = ResolvedModel(vocab_size=512, head_width=512, tokenizer_fingerprint="", hidden_size=QWEN3_8B["hidden_size"])
    return ResolvedRun(
        spec=spec, student=files, teachers=(files,), projection_fingerprints=("",), data_fingerprint="", records=1,
        positions=1, packed=True,
    )  # fmt: skip


def deviation(work: Path) -> float:
    """Return the relative RMS deviation between the states of one GPU and of two."""
    from safetensors.torch import load_file

    one, two = (load_file(work / f"states-{gpus}.safetensors")["states"] for gpus in (1, 2))
    return float((one - two).norm() / one.norm())


if __name__ == "__main__":
    sys.exit(main())
