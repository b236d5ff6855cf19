"""Loading models from Hugging Face directories, with errors that name the directory."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from xtoken_core.config.spec import ModelSpec
from xtoken_core.errors import ConfigError, InputError, first_line
from xtoken_core.model_files import check_model_directory
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.models.packed_attention import NAME as PACKED
from xtoken_services.common.models.packed_attention import check_packing

log = logging.getLogger("xtoken.models")

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def takes_gpu(wanted: str) -> bool:
    """Return whether a process uses a GPU: if `wanted` says so, or is `auto` and torch sees one.

    Raises:
        ConfigError: A GPU is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('workers.device = "cuda": torch sees no GPU here: use "cpu" or "auto"')
    return wanted != "cpu" and torch.cuda.is_available()


def pick_device(wanted: str, rank: int) -> torch.device:
    """Return the device of a rank: `auto` takes a GPU if there is one, by torchrun's `LOCAL_RANK` if that is set.

    Raises:
        ConfigError: A GPU is asked for and there is none.
    """
    if not takes_gpu(wanted):
        return torch.device("cpu")
    rank = int(os.environ.get("LOCAL_RANK", rank))
    return nth_gpu(rank, f"rank {rank}")


def nth_gpu(number: int, what: str) -> torch.device:
    """Return GPU `number` modulo the number of GPUs, with a warning if it is shared thereby.

    Args:
        number: From 0.
        what: Name of the process, for the log.
    """
    count = torch.cuda.device_count()
    device = torch.device("cuda", number % count)
    if number >= count:
        log.warning("%s would be on GPU %d, torch sees %d here: it shares %s", what, number, count, device)
    return device


def load_model(
    spec: ModelSpec,
    what: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    packed: bool = False,
    gpus: int = 1,
    on_host: Callable[[PreTrainedModel], object] | None = None,
) -> PreTrainedModel:
    """Load a causal language model: only safetensors, never code from the directory.

    Args:
        spec: Settings of the model.
        what: Name of the model for errors.
        device: Device to load it to.
        dtype: Dtype of the weights, if not the spec's.
        packed: It is to run on packed rows too.
        gpus: Load this process's part of a model that the processes of the process group divide among them.
        on_host: Called with the model before it is moved to the device; a part is on its device already.

    Raises:
        InputError: It cannot be loaded, or its head is narrower than the configuration says.
        ConfigError: It mixes the samples of a packed row.
    """
    path = check_allowed(spec.model, f"the {what}'s model")
    check_model_directory(path)
    check_architecture(path, what)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype or getattr(torch, spec.dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=PACKED if packed else None,
            **loading_options(path, gpus),
        )
    except Exception as error:  # transformers raises whatever a damaged configuration leads to
        raise InputError(f"cannot load the {what}'s model from {path}: {first_line(error)}") from error
    if on_host is not None:
        on_host(model)
    model.to(device)  # type: ignore[arg-type]  # the stub's decorator loses `self`
    if packed:
        check_packing(model, what)
    return model


def loading_options(directory: Path, gpus: int) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` loads one part of a model divided over a process group.

    Args:
        directory: The model's directory.
        gpus: Number of GPUs, each with a process; the process group is that of all of them.
    """
    if gpus == 1:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    styles = importlib.import_module("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES

    config: Any = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    layers = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.")}
    plan = {f"model.{name}": style for name, style in layers.items()}
    if "replicate" in styles:  # since 5.18 a plan is added to the class's own, which divides both
        plan |= {"lm_head": "replicate", "model.embed_tokens": "replicate"}
    return {"distributed_config": DistributedConfig(tp_size=gpus, tp_plan=plan)}


def check_architecture(directory: Path, what: str) -> None:
    """Refuse a model that transformers has no causal language model for.

    Raises:
        InputError: It has none, or its configuration cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever a damaged configuration leads to
        raise InputError(f"cannot load the {what}'s model from {directory}: {first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"the {what}'s model in {directory} is of the type {config.model_type!r}: transformers "
            f"{transformers.__version__} has no causal language model of it, so name another model"
        )


def head_width(model: PreTrainedModel) -> int:
    """Return the number of rows of the model's head, `V_m`."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(head.weight.shape[0])
