"""Programs that serve a model: what a client needs of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from xtoken_services.common.http_engine.errors import BadRequestError, EngineRefusalError, SampleRefusedError
from xtoken_services.common.http_engine.pool import EnginePool, Replica
from xtoken_services.common.http_engine.scores import PromptScores, TokenId

Answer = TypeVar("Answer")


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_ListedModel]


class _Tokens(msgspec.Struct):
    tokens: list[TokenId]


read_models = msgspec.json.Decoder(_Models).decode
read_tokens = msgspec.json.Decoder(_Tokens).decode


@dataclass(frozen=True)
class ServedModel:
    """A model that a server names.

    Attributes:
        name: Its name.
        max_length: Tokens of the longest text, generated ones included; None: the server does not say.
    """

    name: str
    max_length: int | None


@dataclass(frozen=True)
class Sampling:
    """Settings of a completion.

    Attributes:
        max_tokens: Its length at most.
        seed: Of its random numbers.
        stop: Texts that end it.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that have the same name in every program.

        What is left out a server takes from the model's generation_config.json: completions would be no samples of the
        student.
        """
        stop = {"stop": list(self.stop)} if self.stop else {}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1 if self.top_k is None else self.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **stop,
        }


@dataclass(frozen=True)
class Continuation:
    """A completion by a server.

    Attributes:
        ids: Its tokens as sampled, the end of the text included if the server gives it.
        finished: It ended by itself, not at the limit of its length.
        stopped: A stop string ended it.
        log_probs: Of its tokens, by the whole head, at temperature 1 if the program or the request has it so; empty:
            the program gives none.
    """

    ids: list[int]
    finished: bool
    stopped: bool = False
    log_probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class SharedWeights:
    """Weights in the memory of a GPU, which a server on it opens by CUDA IPC, or that a GPU sends by NCCL.

    Attributes:
        gpu: The GPU's UUID, as torch gives it; by NCCL its device.
        update: Fields of vLLM's `IPCWeightTransferUpdateInfo`, or of `NCCLWeightTransferUpdateInfo`.
        file: Descriptor of a safetensors file to send; None: by CUDA IPC.
    """

    gpu: str
    update: dict[str, Any]
    file: int | None = None


class Engine(ABC):
    """A program that serves a model, on one or several servers; a request carries token ids.

    Args:
        pool: The servers.
        model: Name under which it is served; None: the only one of each server.
        vocab_size: Tokens of its vocabulary.
    """

    def __init__(self, pool: EnginePool, model: str | None, vocab_size: int) -> None:
        self.pool, self.vocab_size = pool, vocab_size
        self._wanted = model
        self._name = model

    def served(self, replica: Replica) -> ServedModel:
        """Return the model that a server runs, from OpenAI's list of models.

        Raises:
            EngineRefusalError: It serves another one, or several and none is named.
        """
        listed = self.pool.call("GET", "/v1/models", decode=read_models, replica=replica).data
        models = {one.id: one for one in listed}
        name = self._wanted or (next(iter(models)) if len(models) == 1 else None)
        if name not in models:
            shown = self.pool.clean(", ".join(sorted(models))) or "none"
            raise EngineRefusalError(
                f"{self.pool.field}.url: {replica.url} serves {shown}: name the one that is meant "
                f"({self.pool.field}.url_model)"
            )
        self._name = name
        return ServedModel(name, models[name].max_model_len)

    @property
    def name(self) -> str:
        """Name of the model in requests, once `served` has read it."""
        return self._name or ""

    def tokenize(self, text: str, replica: Replica) -> list[int]:
        """Return a server's own token ids of a text, with the special tokens that it adds."""
        body: dict[str, Any] = {"model": self.name, "prompt": text, "add_special_tokens": True}
        answer = self.pool.call("POST", "/tokenize", body, decode=read_tokens, entries=len(text), replica=replica)
        return answer.tokens

    @abstractmethod
    def score(self, ids: Sequence[int], k: int, replica: Replica | None = None) -> PromptScores:
        """Return the log-probabilities of a text, at temperature 1.

        Args:
            ids: Its tokens, with all special tokens.
            k: Maximum of tokens of a position; 0: only the text's own.
            replica: The server; None: any.

        Raises:
            EngineError: No server has answered in time.
            EngineRefusalError: A server refuses the request, or answers in another form.
            SampleRefusedError: The server cannot take this text.
        """

    @abstractmethod
    def complete(self, ids: Sequence[int], sampling: Sampling, replica: Replica | None = None) -> Continuation:
        """Complete a prompt.

        Args:
            ids: Its tokens, with all special tokens.
            sampling: Lengths and distribution.
            replica: The server; None: any.

        Raises:
            EngineError: No server has answered in time.
            EngineRefusalError: A server refuses the request, or answers in another form.
            SampleRefusedError: The server cannot take this text.
        """

    @abstractmethod
    def load_weights(self, weights: Path | SharedWeights, version: str, replica: Replica) -> None:
        """Request that a server loads weights; from then on it completes prompts with no others.

        Args:
            weights: Directory of the model, which the server sees under the same path; vLLM takes shared ones too.
            version: Name of these weights.
            replica: The server.

        Raises:
            EngineError: It has not answered in time.
            EngineRefusalError: It cannot.
        """

    def restored(self) -> bool:
        """Return whether servers were started again since they loaded weights; load them again.

        Completions since the last call may then be by other weights. A program whose answers name theirs returns False.
        """
        return False

    def _answer(self, send: Callable[[dict[str, Any]], Answer], body: dict[str, Any], field: str) -> Answer:
        """Send a request about the text whose tokens are in a field of it.

        Raises:
            SampleRefusedError: A server refuses it, and takes the same request about the first token alone.
        """
        try:
            return send(body)
        except BadRequestError as error:
            send(body | {field: body[field][:1]})
            raise SampleRefusedError(str(error)) from error

    @contextmanager
    def _paused(self, replica: Replica, pause: str, resume: str, body: Any = None) -> Iterator[None]:
        """Let a server generate nothing meanwhile: beside a running request it keeps keys and values of old weights."""
        with self.pool.holding(replica):
            self.pool.call("POST", pause, body, decode=bytes, replica=replica)
            try:
                yield
            finally:
                self.pool.call("POST", resume, body and {}, decode=bytes, replica=replica)
