"""A server that generates with weights which are updated, as vLLM 0.24.0 and SGLang 0.5.23 do in what a client sees.

Their published request and response models, and the code behind them, say which fields a request may have, what a
process that starts again lacks, that cached keys and values stay while any request runs, and what a pause does to
running ones.
"""

import io
import itertools
import pickle
import threading
from base64 import b64decode
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from tests.support.engine_server import Answer
from xtoken_services.common.http_engine import nccl

OK: Answer = (200, {}, b"")
LOADING = threading.Lock()
"""Of all servers: `from_pretrained` replaces methods of transformers' classes meanwhile; two at once leave them so."""
STARTED = 1_772_367_069.12
"""Start time of every server's process, as if one script had started them at the same moment."""
CREATED = itertools.count(1)
"""Microseconds after it at which a server's counters are made."""
MEMORY: dict[int, torch.Tensor] = {}
"""Stands for a GPU's memory, which CUDA IPC opens: tensors of this process by the handles that `shared` gives."""
GPU = "f5c7a8e0-1a2b-4c3d-8e9f-000000000001"
FIELDS = {
    # io_struct.py of SGLang: UpdateWeightFromDiskReqInput, PauseGenerationReqInput, ContinueGenerationReqInput.
    "/update_weights_from_disk": {
        "model_path", "load_format", "abort_all_requests", "weight_version", "is_async", "torch_empty_cache",
        "keep_pause", "recapture_cuda_graph", "token_step", "flush_cache", "manifest",
    },
    "/pause_generation": {"mode"},
    "/continue_generation": {"torch_empty_cache"},
    # api_router.py of vLLM's `serve/dev/rpc`.
    "/collective_rpc": {"method", "args", "kwargs", "timeout"},
    # api_router.py of `serve/dev/rlhf`.
    "/init_weight_transfer_engine": {"init_info"}, "/start_weight_update": {"is_checkpoint_format"},
    "/update_weights": {"update_info"},
    # nccl_engine.py of `distributed/weight_transfer`.
    "NCCLWeightTransferInitInfo": {"master_address", "master_port", "rank_offset", "world_size"},
    "NCCLWeightTransferUpdateInfo": {"names", "dtype_names", "shapes"},
}  # fmt: skip


def shared(weight: torch.Tensor) -> tuple[None, tuple[int]]:
    """Stands for torch's `reduce_tensor`."""
    MEMORY[weight.data_ptr()] = weight
    return None, (weight.data_ptr(),)


class UniqueIds(pickle.Unpickler):
    """Unpickles the id of a communicator as its bytes."""

    def find_class(self, module: str, name: str) -> Any:
        assert name == "ncclUniqueId.from_buffer_copy" and module.endswith(".device_communicators.pynccl_wrapper")
        return bytes


def failed(reason: str) -> Answer:
    """An answer of vLLM whose workers have raised an exception."""
    return 500, {}, {"error": {"message": f"Call to collective_rpc method failed: {reason}"}}


class GeneratingServer:
    """A model in a directory, decoded greedily.

    Args:
        start: Directory that it is started with.
        end: Token that ends a text.
        max_length: Tokens of the longest text.

    Attributes:
        held: Prompt whose completion runs until it is aborted, or a pause waits for it.
        gpu: Its GPU.
        unpickles: VLLM_ALLOW_INSECURE_SERIALIZATION is set.
        in_update: An update of the weights has begun and not ended.
        device: Where it receives weights by NCCL; None: it opens a GPU's memory.
        dies_at: Tensor after which it dies in such an update.
    """

    def __init__(self, start: Path, end: int, max_length: int = 4096) -> None:
        self.start, self.end, self.max_length = start, end, max_length
        self.created = STARTED + next(CREATED) / 1e6
        self.seen: list[str] = []
        self.held: list[int] | None = None
        self.gpu, self.unpickles, self.in_update = GPU, True, False
        self.device: str | None = None
        self.dies_at, self._group = -1, None  # type: int, Any
        self.holding = threading.Event()
        self.version, self.paused, self.updating, self.running = "default", False, False, 0
        self._let_go = False
        self._changed = threading.Condition()
        self._cache: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        self._model: Any = None
        self._path = start

    def __call__(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        path, query = urlsplit(path).path, parse_qs(urlsplit(path).query)
        self.seen.append(path)
        if path in FIELDS and not (isinstance(body, dict) and body.keys() <= FIELDS[path]):
            return 400, {}, {"error": {"message": f"fields of {body}"}}
        routes = {
            "/v1/models": self._models, "/model_info": self._model_info, "/generate": self._generate,
            "/update_weights_from_disk": self._update, "/pause_generation": self._pause_sglang,
            "/continue_generation": self._continue_sglang, "/v1/completions": self._complete,
            "/collective_rpc": self._reload, "/reset_prefix_cache": self._reset, "/pause": self._pause_vllm,
            "/resume": self._resume_vllm, "/metrics": self._metrics,
            "/init_weight_transfer_engine": self._join, "/get_world_size": lambda *_: (200, {}, {"world_size": 1}),
            "/start_weight_update": self._start_update,
            "/update_weights": self._copy_weights, "/finish_weight_update": self._finish_update,
        }  # fmt: skip
        return routes[path](body, query) if path in routes else (404, {}, {"detail": "Not Found"})

    def _models(self, body: Any, query: Any) -> Answer:
        return 200, {}, {"data": [{"id": "m", "root": str(self.start), "max_model_len": self.max_length}]}

    def _metrics(self, body: Any, query: Any) -> Answer:
        # As prometheus_client writes it; vLLM with several API servers lists no process.
        start, counter = "process_start_time_seconds", "vllm:prompt_tokens"
        labels = '{engine="0",model_name="m"}'
        lines = (
            f"# HELP {start} Start time.", f"# TYPE {start} gauge", f"{start} {STARTED / 1e9}e+09",
            f"# TYPE {counter}_total counter", f"{counter}_total{labels} {float(len(self.seen))}",
            f"# TYPE {counter}_created gauge", f"{counter}_created{labels} {self.created / 1e9}e+09",
        )  # fmt: skip
        return 200, {}, "\n".join([*lines, ""]).encode()

    def _model_info(self, body: Any, query: Any) -> Answer:
        return 200, {}, {"model_path": str(self._path), "weight_version": self.version}

    def _update(self, body: Any, query: Any) -> Answer:
        if not (Path(body["model_path"]) / "config.json").is_file():
            return 400, {}, {"success": False, "message": "Failed to get model config", "num_paused_requests": 0}
        with self._changed:  # its lock of the model: nothing begins, and it waits for what runs
            self.updating = True
            self._changed.wait_for(lambda: not self.running)
            self._load(Path(body["model_path"]))
            self.version = body.get("weight_version") or self.version
            self._cache.clear()
            self.updating = False
            self._changed.notify_all()
        return 200, {}, {"success": True, "message": "Succeeded", "num_paused_requests": 0}

    def _pause_sglang(self, body: Any, query: Any) -> Answer:
        assert body.get("mode", "abort") == "abort"
        self._pause()
        return 200, {}, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue_sglang(self, body: Any, query: Any) -> Answer:
        self._resume()
        return 200, {}, {"message": "Generation continued successfully.", "status": "ok"}

    def _pause_vllm(self, body: Any, query: Any) -> Answer:
        assert query.get("mode", ["abort"])[0] in ("abort", "wait")
        self._pause()
        self._flushed()
        return 200, {}, {"status": "paused"}

    def _resume_vllm(self, body: Any, query: Any) -> Answer:
        self._resume()
        return 200, {}, {"status": "resumed"}

    def _reset(self, body: Any, query: Any) -> Answer:
        self._flushed()  # "we currently do not check if the prefix cache is successfully reset in the API server"
        return OK

    def _reload(self, body: Any, query: Any) -> Answer:
        assert body["method"] == "reload_weights" and body.get("kwargs", {}).keys() <= {"weights_path"}
        path = Path(body.get("kwargs", {}).get("weights_path", self._path))
        if not (path / "config.json").is_file():
            return 500, {}, {"error": {"message": "Internal server error"}}
        self._load(path)
        return 200, {}, {"results": [None]}

    def _start_update(self, body: Any, query: Any) -> Answer:
        if self.in_update:
            return failed("start_weight_update called while a weight update is already active")
        self.in_update = True
        return OK

    def _copy_weights(self, body: Any, query: Any) -> Answer:
        update = body["update_info"]
        if not self.in_update:
            return failed("start_weight_update must be called before update_weights.")
        if self.device is not None:
            return self._receive(update)
        handles = pickle.loads(b64decode(update["ipc_handles_pickled"]))
        refusals = {
            "Refusing to deserialize `ipc_handles_pickled` without VLLM_ALLOW_INSECURE_SERIALIZATION=1": self.unpickles,
            f"IPC handle not found for GPU UUID {self.gpu}": all(self.gpu in handle for handle in handles),
        }
        self.in_update = all(refusals.values())
        if not self.in_update:
            return failed(next(reason for reason, holds in refusals.items() if not holds))
        return self._copy(update, [MEMORY[handle[self.gpu][0]] for handle in handles])

    def _receive(self, update: Any) -> Answer:
        assert update.keys() == FIELDS["NCCLWeightTransferUpdateInfo"]
        torch.cuda.set_device(self.device)  # of this thread
        tensors: list[torch.Tensor] = []
        for name, shape in zip(update["dtype_names"], update["shapes"], strict=True):
            tensors.append(torch.empty(shape, dtype=getattr(torch, name), device=self.device))
            self._group.broadcast(tensors[-1])
            torch.cuda.synchronize()
            if self.dies_at == len(tensors):  # and is started again; our end waits in the old group
                vars(self).update(vars(GeneratingServer(self.start, self.end)), device=self.device, lost=self._group)
                raise ConnectionAbortedError
        return self._copy(update, tensors)

    def _join(self, body: Any, query: Any) -> Answer:
        info = body["init_info"]
        if self.device is None:
            return OK if not info else failed("unexpected keyword argument 'master_address'")
        # As `StatelessProcessGroup` and `PyNcclCommunicator` do at rank 1.
        assert info.keys() == FIELDS["NCCLWeightTransferInitInfo"]
        store = TCPStore(info["master_address"], info["master_port"], 2, False, use_libuv=False)
        name = UniqueIds(io.BytesIO(store.get("broadcast_from/0/0"))).load()
        torch.cuda.set_device(self.device)
        self._group = nccl.Communicator(info["world_size"], name, info["rank_offset"])
        self._group.all_reduce(torch.zeros(1, device=self.device))
        return OK

    def _copy(self, update: Any, tensors: list[torch.Tensor]) -> Answer:
        if self._model is None:
            self._load(self._path)
        assert [list(tensor.shape) for tensor in tensors] == update["shapes"]
        assert [str(tensor.dtype) for tensor in tensors] == [f"torch.{name}" for name in update["dtype_names"]]
        weights = dict(self._model.named_parameters())
        assert weights.keys() == set(update["names"])
        with torch.no_grad():
            for name, tensor in zip(update["names"], tensors, strict=True):
                weights[name].copy_(tensor)
        return OK

    def _finish_update(self, body: Any, query: Any) -> Answer:
        if not self.in_update:
            return failed("finish_weight_update called without a matching start_weight_update.")
        self.in_update = False
        return OK

    def _generate(self, body: Any, query: Any) -> Answer:
        parameters = body["sampling_params"]
        made = self._completion(body["input_ids"], parameters["max_new_tokens"])
        if isinstance(made, str):
            return 400, {}, {"error": {"message": made}}
        ids, reason = [token for token, _ in made], "length" if made else "abort"
        finish = {"type": "stop", "matched": self.end} if ids[-1:] == [self.end] else {"type": reason}
        listed = [[value, token, None] for token, value in made]
        meta = {"finish_reason": finish, "output_token_logprobs": listed, "weight_version": self.version}
        return 200, {}, {"text": "", "output_ids": ids, "meta_info": meta}

    def _complete(self, body: Any, query: Any) -> Answer:
        made = self._completion(body["prompt"], body["max_tokens"])
        if isinstance(made, str):
            return 400, {}, {"error": {"message": made, "type": "BadRequestError", "param": None, "code": 400}}
        ids, reason = [token for token, _ in made], "length" if made else "abort"
        listed = {
            "tokens": ["text"] * len(ids), "token_logprobs": [value for _, value in made],
            "top_logprobs": [{"text": value} for _, value in made], "text_offset": [0] * len(ids),
        }  # fmt: skip
        reason = "stop" if ids[-1:] == [self.end] else reason
        choice = {"index": 0, "text": "", "finish_reason": reason, "stop_reason": None, "logprobs": listed}
        choice["token_ids"] = ids if body.get("return_token_ids") else None
        return 200, {}, {"choices": [choice]}

    def _load(self, path: Path) -> None:
        with LOADING:
            self._path, self._model = path, AutoModelForCausalLM.from_pretrained(path).eval()

    def _flushed(self) -> None:
        with self._changed:
            if not self.running:
                self._cache.clear()

    def _pause(self) -> None:
        """Let the running requests end, and wait for them."""
        with self._changed:
            self.paused, self._let_go = True, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.running)

    def abort(self) -> None:
        """Let the running requests end, as another client may demand."""
        self._pause()
        self._resume()

    def _resume(self) -> None:
        with self._changed:
            self.paused = self._let_go = False
            self._changed.notify_all()

    @torch.no_grad()
    def _completion(self, ids: list[int], most: int) -> list[tuple[int, float]] | str:
        """Return tokens with their log-probabilities, none if they were aborted, or why the request is refused."""
        if len(ids) + most > self.max_length:
            return f"Requested token count exceeds the model's maximum context length of {self.max_length} tokens"
        with self._changed:
            self._changed.wait_for(lambda: not (self.paused or self.updating))
            self.running += 1
        try:
            if ids == self.held:
                self.holding.set()
                with self._changed:
                    self._changed.wait_for(lambda: self._let_go)
                return []
            if self._model is None:
                self._load(self._path)
            if tuple(ids) not in self._cache:
                self._cache[tuple(ids)] = self._greedy(ids, most)
            return self._cache[tuple(ids)]
        finally:
            with self._changed:
                self.running -= 1
                self._changed.notify_all()

    def _greedy(self, ids: list[int], most: int) -> list[tuple[int, float]]:
        row, made = list(ids), []
        while len(made) < most and row[-1] != self.end:
            values = self._model(torch.tensor([row])).logits[0, -1].double().log_softmax(-1)
            row.append(int(values.argmax()))
            made.append((row[-1], float(values.max())))
        return made
