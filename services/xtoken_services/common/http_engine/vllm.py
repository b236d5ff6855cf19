"""vLLM: completions of no text, with the log-probabilities of the prompt (`prompt_logprobs`).

Written after the request and response models of 0.24.0, and run with it. A teacher's server needs `--max-logprobs` of
at least `teacher.topk`; its default is 20. One that generates reads new weights by `reload_weights` of its workers,
copies them from its GPU's memory or receives them by NCCL; each takes `VLLM_SERVER_DEV_MODE=1`. Its answers name no
weights: times in its metrics show a restart.
"""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from xtoken_services.common.http_engine.engine import Continuation, Engine, Sampling, SharedWeights
from xtoken_services.common.http_engine.errors import EngineError, EngineRefusalError
from xtoken_services.common.http_engine.pool import CONNECT_S, EnginePool, Replica
from xtoken_services.common.http_engine.scores import (
    NOTHING,
    LogProb,
    PromptScores,
    ScoresBuilder,
    TokenId,
    check_length,
    token_id,
)
from xtoken_services.common.processes.supervised import PYTHON

log = logging.getLogger("xtoken.engine")

PROCESS = re.compile(rb"^(process_start_time_seconds|vllm:prompt_tokens_created)\b.* (\S+)$", re.MULTILINE)
"""Lines of a server's metrics that no other process has: the start to 10 ms, which servers that one script starts may
have in common, and when each engine's counter was made, seconds later, to less than 1 us."""
LOADS = 3
"""Attempts to load weights into a server: it may be started again in between."""
FINISH = "/finish_weight_update"
SENDER = (*PYTHON, "xtoken_services.common.http_engine.nccl_sender")
START_S, KILL_S = 120.0, 10.0
"""Most seconds in which it begins, and in which the driver frees a killed one."""


class _Entry(msgspec.Struct):
    logprob: LogProb


class _Generated(msgspec.Struct):
    """Of generated tokens, named `token_id:N` by `return_tokens_as_token_ids`."""

    token_logprobs: list[LogProb] = []
    top_logprobs: list[dict[str, LogProb] | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Generated | None = None
    token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[TokenId, _Entry] | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class _WorldSize(msgspec.Struct):
    world_size: int


read_completion = msgspec.json.Decoder(_Completion).decode
read_world_size = msgspec.json.Decoder(_WorldSize).decode


class NcclGroup:
    """A server's workers and a process of ours that sends them weights, rank 0; it alone waits in NCCL.

    Args:
        replica: The server.
        size: Number of its workers and one.
        weights: The weights to send.
        process: Lines of the server's metrics that no other process has.

    Attributes:
        init_info: Fields of vLLM's `NCCLWeightTransferInitInfo`.

    Raises:
        OSError: The server cannot be reached.
        EngineRefusalError: The process has ended, or does not wait for the server in time.
    """

    def __init__(self, replica: Replica, size: int, weights: SharedWeights, process: list[tuple[bytes, bytes]]) -> None:
        self.process = process
        url = replica.client.base_url
        port = url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection((url.host, port), CONNECT_S) as way:
            family, address = way.family, way.getsockname()[0]
        self._channel, other = socket.socketpair()
        with other, socket.create_server((address, 0), family=family) as listener:
            port = listener.getsockname()[1]
            files = listener.fileno(), weights.file or 0
            job = msgspec.json.encode((*files, address, port, size, weights.gpu)).decode()
            self._sender = subprocess.Popen([*SENDER, job], stdin=other.fileno(), pass_fds=files)
        self.init_info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size}
        self._channel.settimeout(START_S)
        with suppress(OSError):
            if self._channel.recv(1):
                return
        self.close()
        raise EngineRefusalError(
            f"the process that sends weights from {weights.gpu} has not begun: the log says why; or set "
            'rollout.url_weights to "directory"'
        )

    def send(self) -> None:
        """Begin to send the file; done when the server has answered.

        Raises:
            OSError: The process has ended.
        """
        self._channel.sendall(b"\n")

    def close(self) -> None:
        """Kill the process, whatever it waits for."""
        self._channel.close()
        self._sender.kill()
        with suppress(subprocess.TimeoutExpired):
            self._sender.wait(KILL_S)


class VllmEngine(Engine):
    """vLLM. A server that is started again has the weights of its start, and its answers do not show it."""

    def __init__(self, pool: EnginePool, model: str | None, vocab_size: int) -> None:
        super().__init__(pool, model, vocab_size)
        self._loaded: dict[str, tuple[Path | SharedWeights, str, list[tuple[bytes, bytes]]]] = {}
        self._groups: dict[str, NcclGroup] = {}

    def score(self, ids: Sequence[int], k: int, replica: Replica | None = None) -> PromptScores:
        """See `Engine.score`."""
        body = {
            "model": self.name,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": k,
            "logprobs": k,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        choice = self._completion(body, len(ids) * (k + 2), replica)
        builder = ScoresBuilder(len(ids), k, self.vocab_size)
        listed = choice.prompt_logprobs or []
        check_length(listed, len(ids), "prompt_logprobs")
        width = k + 1  # k of them, and the text's own if it is none of these
        names: list[int] = []
        values: list[float] = []
        for position, (token, entries) in enumerate(zip(ids[1:], listed[1:], strict=True)):
            if entries is None or token not in entries or len(entries) > width:
                raise EngineRefusalError(
                    "prompt_logprobs of an answer lacks the text's own token, or lists more than were requested: check "
                    "url_engine"
                )
            builder.add_own(position, entries[token].logprob)
            missing = width - len(entries)
            names += [*entries, *[-1] * missing]
            values += [*(entry.logprob for entry in entries.values()), *[NOTHING] * missing]
        shape = len(ids) - 1, width
        builder.add_rows(0, np.array(names, dtype=np.int64).reshape(shape), np.array(values).reshape(shape))
        if choice.logprobs and choice.logprobs.top_logprobs:
            after = choice.logprobs.top_logprobs[0] or {}
            builder.add(len(ids) - 1, [(token_id(name), value) for name, value in after.items()], None)
        return builder.scores()

    def complete(self, ids: Sequence[int], sampling: Sampling, replica: Replica | None = None) -> Continuation:
        """See `Engine.complete`."""
        body: dict[str, Any] = {
            "model": self.name,
            "prompt": list(ids),
            "max_tokens": sampling.max_tokens,
            **sampling.parameters(),
            "seed": sampling.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        choice = self._completion(body, len(ids) + 4 * sampling.max_tokens, replica)
        tokens = choice.token_ids
        if tokens is None:
            raise EngineRefusalError("an answer lacks token_ids: check url_engine, or use a newer vLLM")
        values = tuple(choice.logprobs.token_logprobs) if choice.logprobs else ()
        check_length(values, len(tokens), "token_logprobs")
        return Continuation(tokens, choice.finish_reason == "stop", isinstance(choice.stop_reason, str), values)

    def load_weights(self, weights: Path | SharedWeights, version: str, replica: Replica) -> None:
        """See `Engine.load_weights`; the server must have been started in development mode."""
        if isinstance(weights, Path):
            hint = f"let it see {weights} under the same path"
        elif weights.file is None:
            hint = (
                f"start it with CUDA_VISIBLE_DEVICES=GPU-{weights.gpu}, VLLM_ALLOW_INSECURE_SERIALIZATION=1 and "
                """--weight-transfer-config '{"backend": "ipc"}'"""
            )
        else:
            hint = (
                f"start it (again, if it hangs) on another GPU than {weights.gpu} of this machine and with "
                """--weight-transfer-config '{"backend": "nccl"}'; on the same GPU set rollout.url_weights = "ipc\""""
            )
        call = partial(self.pool.call, "POST", decode=bytes, replica=replica, repeats=False)
        for left in reversed(range(LOADS)):
            process = self._process_of(replica)  # before: one that is started again meanwhile must load them once more
            began = time.monotonic()
            try:
                with self._paused(replica, "/pause?mode=wait", "/resume"):
                    for path, body in self._updating(weights, replica, process):
                        call(path, body)
            except (EngineError, OSError) as error:  # it answers with status 500, whatever the reason
                if replica.url in self._groups:
                    self._groups.pop(replica.url).close()
                hangs = time.monotonic() - began > self.pool.timeout_s  # more waits: this worker would count as hung
                if isinstance(weights, SharedWeights) and not hangs:
                    with suppress(EngineError):  # an update that was broken off lets no other one begin
                        call(FINISH)
                if hangs or not left:
                    raise EngineError(f"{error}; {hint}") from error
            else:
                self._loaded[replica.url] = weights, version, process
                return

    def _updating(
        self, weights: Path | SharedWeights, replica: Replica, process: list[tuple[bytes, bytes]]
    ) -> Iterator[tuple[str, Any]]:
        """Yield path and body of each request that updates a server's weights."""
        if isinstance(weights, Path):
            yield "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        else:
            group = self._groups.get(replica.url)
            if weights.file is None:
                yield "/init_weight_transfer_engine", {"init_info": {}}
            elif group is None or group.process != process:
                if group is not None:
                    group.close()
                workers = self.pool.call(
                    "GET", "/get_world_size", decode=read_world_size, replica=replica, repeats=False
                )
                group = self._groups[replica.url] = NcclGroup(replica, workers.world_size + 1, weights, process)
                yield "/init_weight_transfer_engine", {"init_info": group.init_info}
            yield "/start_weight_update", {"is_checkpoint_format": True}
            if group is not None:
                group.send()
            yield "/update_weights", {"update_info": weights.update}
            yield FINISH, None
        yield "/reset_prefix_cache", None

    def restored(self) -> bool:
        """See `Engine.restored`."""
        restarted = False
        for replica in self.pool.replicas:
            weights, version, process = self._loaded.get(replica.url, (None, "", []))
            if weights is not None and self._process_of(replica) != process:
                log.warning("%s has been started again: loading the weights %s", replica.url, version)
                self.load_weights(weights, version, replica)
                restarted = True
        return restarted

    def _process_of(self, replica: Replica) -> list[tuple[bytes, bytes]]:
        """Return the lines of a server's metrics that no other process has."""
        found = PROCESS.findall(self.pool.call("GET", "/metrics", decode=bytes, replica=replica))
        for name in (b"process_start_time_seconds", b"vllm:prompt_tokens_created"):
            if name not in dict(found):
                raise EngineRefusalError(
                    f"{self.pool.field}.url: {replica.url}/metrics has no {name.decode()}, by which a restart is "
                    "noticed: start it with --api-server-count 1 and without --disable-log-stats, "
                    "PROMETHEUS_MULTIPROC_DIR and PROMETHEUS_DISABLE_CREATED_SERIES"
                )
        return found

    def _completion(self, body: dict[str, Any], entries: int, replica: Replica | None) -> _Choice:
        send = partial(
            self.pool.call,
            "POST",
            "/v1/completions",
            decode=read_completion,
            entries=entries,
            replica=replica,
            usable=lambda answer, _: answer.choices[0].finish_reason != "abort",
        )
        return self._answer(send, body, "prompt").choices[0]
