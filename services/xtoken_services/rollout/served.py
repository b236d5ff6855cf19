"""Completions by servers over HTTP, which take every version of the weights from a directory or a GPU."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import stat
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from xtoken_core.atomic import atomic_path, atomic_write
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.model_files import INDEX, SUFFIX, WHOLE
from xtoken_core.regular_files import proc_path
from xtoken_services.common.generation.published_weights import Version, load_weights, read_weights
from xtoken_services.common.generation.sampling import Sampled
from xtoken_services.common.generation.vocabulary import Vocabulary
from xtoken_services.common.http_engine.engine import Engine, Sampling, SharedWeights
from xtoken_services.common.http_engine.errors import EngineRefusalError, SampleRefusedError
from xtoken_services.common.http_engine.nccl_sender import tensors_of
from xtoken_services.common.http_engine.pool import Replica
from xtoken_services.common.http_engine.results import results_of

log = logging.getLogger("xtoken.rollout")

MODEL = "rollout-model"
"""Directory below the run's output that servers read."""
THREADS = 256
"""Most requests that a worker waits for."""
SEEDS = 1 << 63
"""Seeds of a request are below this."""


class ServedSampler:
    """Completes prompts by servers, as `Sampler` does by a model of its own.

    Args:
        engine: The servers.
        vocabulary: Tokens of the student.
        settings: Lengths and distribution.
        student: Directory of the student's configuration and tokenizer.
        directory: Where the weights are written for the servers.
        longest: Tokens of the longest prompt with its completion.
        model: The student on a GPU that the servers are on too; None: they read the directory.
        gpu: Device that sends them the weights by NCCL instead.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        settings: RolloutSpec,
        student: Path,
        directory: Path,
        *,
        longest: int,
        model: nn.Module | None = None,
        gpu: str | None = None,
    ) -> None:
        self.engine, self.vocabulary, self.settings = engine, vocabulary, settings
        self.student, self.directory, self.longest = student, directory, longest
        self.model, self.gpu = model, gpu
        self._shared: SharedWeights | None = None
        self._allowed = vocabulary.allowed.tolist()
        self._threads = ThreadPoolExecutor(
            min(len(engine.pool.replicas) * engine.pool.limit, THREADS), thread_name_prefix="engine"
        )

    def load(self, path: Path) -> Version:
        """Load the published weights into all servers; return their version.

        Args:
            path: File of the published weights.

        Raises:
            InputError: The file cannot be read.
            EngineError: A server has not answered in time.
            EngineRefusalError: One has not loaded them.
        """
        if self.model is not None:
            version = load_weights(self.model, path)
            self._shared = share(self.model, self._shared)
        else:
            version, payload = read_weights(path)
            if self.gpu is not None:
                self._shared = sendable(payload, self.gpu, self._shared)
            else:
                self._copy_missing()
                atomic_write(self.directory / WHOLE, payload)
        name = f"{version.tag}-{version.step}"
        loads = [self._threads.submit(self._load, name, replica) for replica in self.engine.pool.replicas]
        results_of(loads, lambda _: None)
        return version

    def complete(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], progress: Callable[[int], None]
    ) -> list[Sampled]:
        """Complete a batch of prompts; see `Sampler.complete`. A prompt that a server refuses has no tokens.

        Raises:
            EngineError: No server has answered in time.
            EngineRefusalError: A server refuses a request.
        """
        while True:
            futures = [
                self._threads.submit(self._complete, prompt.tolist(), seed)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            sampled = results_of(futures, progress)
            if not self.engine.restored():
                return sampled

    def _load(self, version: str, replica: Replica) -> None:
        served = self.engine.served(replica)
        if served.max_length is not None and served.max_length < self.longest:
            raise EngineRefusalError(
                f"{self.engine.pool.field}.url: {replica.url} takes {served.max_length} tokens, and a prompt with its "
                f"completion may have {self.longest}: lower student.context_length, or start the server with more"
            )
        self.engine.load_weights(self._shared or self.directory, version, replica)

    def _copy_missing(self) -> None:
        """Copy the student's files that the directory lacks, each whole: a worker may have been killed at this."""
        self.directory.mkdir(mode=0o755, exist_ok=True)
        # Servers may be another user's: they pass through the run's directory, without a right to list it.
        self.directory.parent.chmod(stat.S_IMODE(self.directory.parent.stat().st_mode) | 0o011)
        for file in self.student.iterdir():
            target = self.directory / file.name
            if file.is_file() and file.suffix != SUFFIX and file.name != INDEX and not target.exists():
                with atomic_path(target) as scratch:
                    shutil.copyfile(file, scratch)

    def _complete(self, prompt: list[int], seed: int) -> Sampled:
        settings = self.settings
        sampling = Sampling(
            settings.max_new_tokens, seed % SEEDS, settings.temperature, settings.top_k, settings.top_p, settings.stop
        )
        try:
            answer = self.engine.complete(prompt, sampling)
        except SampleRefusedError as error:
            log.warning("%s", error)
            return Sampled()
        ids, ends = list(answer.ids[: settings.max_new_tokens]), self.vocabulary.ends
        ids = ids[: next((at for at, token in enumerate(ids, 1) if token in ends), len(ids))]
        log_probs = [min(value, 0.0) for value in answer.log_probs[: settings.max_new_tokens]]
        if answer.finished and not answer.stopped and ids[-1:] and ids[-1] not in ends:
            ids.append(min(ends))  # a program may leave the end of the text out of its answer
            log_probs.append(0.0)  # nothing follows whose weight it would change
        kept = next((at for at, token in enumerate(ids) if not self._may_be(token)), len(ids))
        whole = kept == len(ids)
        ended = whole and ids[-1:] != [] and ids[-1] in ends
        return Sampled(ids[:kept], ended, whole and answer.stopped, log_probs=log_probs[:kept])

    def _may_be(self, token: int) -> bool:
        """Return False for a token that spells no text: a server samples from the whole head."""
        return 0 <= token < len(self._allowed) and self._allowed[token]


def share(model: nn.Module, before: SharedWeights | None = None) -> SharedWeights:
    """Return the weights of a model on a GPU for servers, which may open them as long as the model is there.

    Args:
        model: The model; this waits until its weights are written.
        before: What an earlier call has returned, which stays right: torch wraps memory anew whenever it is shared.
    """
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    gpu = next(iter(weights.values())).device
    torch.cuda.synchronize(gpu)
    if before is not None:
        return before
    uuid = str(torch.cuda.get_device_properties(gpu).uuid)
    handles = [{uuid: reduce_tensor(weight)[1]} for weight in weights.values()]  # type: ignore[no-untyped-call]
    return SharedWeights(uuid, _fields(weights) | {"ipc_handles_pickled": b64encode(pickle.dumps(handles)).decode()})


def sendable(payload: bytes, gpu: str, before: SharedWeights | None = None) -> SharedWeights:
    """Return weights that a GPU sends to servers by NCCL.

    Args:
        payload: Bytes of a safetensors file, which are kept in memory without a name.
        gpu: The device.
        before: What an earlier call has returned, which changes: no server receives from it any more.
    """
    file = os.memfd_create("weights") if before is None or before.file is None else before.file
    Path(proc_path(file)).write_bytes(payload)
    return SharedWeights(gpu, _fields(dict(tensors_of(file, "cpu"))), file)


def _fields(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of an update that vLLM reads whichever way weights come."""
    return {
        "names": list(weights),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
    }
