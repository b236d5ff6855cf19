"""SGLang: its own `/generate`, with the log-probabilities of the input.

Written after the request and response models of 0.5.23. Not run yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal

import msgspec
import numpy as np

from xtoken_services.common.http_engine.engine import Continuation, Engine, Sampling, SharedWeights
from xtoken_services.common.http_engine.errors import BadRequestError, EngineRefusalError
from xtoken_services.common.http_engine.pool import EnginePool, Replica
from xtoken_services.common.http_engine.scores import (
    MAX_LOG_PROB,
    LogProb,
    PromptScores,
    ScoresBuilder,
    TokenId,
    check_length,
)

log = logging.getLogger("xtoken.engine")

SEEDS = 1 << 31
"""Seeds of a request are below this. They count only if the server was started for deterministic inference."""
LOADS = 3
"""Attempts to load weights into a server: it may be started again in between."""

Scored = tuple[LogProb | None, TokenId, str | None]
"""Log-probability, id and text of a token; the first token of a text has none of the first."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 30)]


class _Scores(msgspec.Struct):
    """Log-probabilities of a text; the likeliest tokens are arrays in base64, a third of the bytes of lists."""

    input_token_logprobs: list[Scored]
    input_top_logprobs_val_flat_b64: bytes = b""
    input_top_logprobs_idx_flat_b64: bytes = b""
    input_top_logprobs_val_flat_b64_dtype: Literal["float32"] = "float32"
    input_top_logprobs_idx_flat_b64_dtype: Literal["int32"] = "int32"
    input_top_logprobs_shape: tuple[Count, Count] | None = None
    input_top_logprobs_null_prefix: Count = 0
    output_top_logprobs: list[list[Scored] | None] | None = None


class _Reason(msgspec.Struct):
    type: str
    matched: str | int | list[int] | None = None


class _Generated(msgspec.Struct):
    output_token_logprobs: list[Scored]
    finish_reason: _Reason
    weight_version: str | None = None


class _ScoredText(msgspec.Struct):
    meta_info: _Scores


class _Completion(msgspec.Struct):
    meta_info: _Generated


class _Model(msgspec.Struct):
    weight_version: str | None = None


read_scores = msgspec.json.Decoder(_ScoredText).decode
read_completion = msgspec.json.Decoder(_Completion).decode
read_model = msgspec.json.Decoder(_Model).decode


class SglangEngine(Engine):
    """SGLang. A server that is started again has the weights of its start: every answer names its version."""

    def __init__(self, pool: EnginePool, model: str | None, vocab_size: int) -> None:
        super().__init__(pool, model, vocab_size)
        self._weights: tuple[Path, str] | None = None
        self._reloading = Lock()

    def score(self, ids: Sequence[int], k: int, replica: Replica | None = None) -> PromptScores:
        """See `Engine.score`."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
        entries = len(ids) * (k + 2)
        send = partial(self.pool.call, "POST", "/generate", decode=read_scores, entries=entries, replica=replica)
        meta = self._answer(send, body, "input_ids").meta_info
        check_length(meta.input_token_logprobs, len(ids), "input_token_logprobs")
        builder = ScoresBuilder(len(ids), k, self.vocab_size)
        for position, (token, own) in enumerate(zip(ids[1:], meta.input_token_logprobs[1:], strict=True)):
            if own[0] is None or own[1] != token:
                raise EngineRefusalError("input_token_logprobs of an answer is of other tokens: check url_engine")
            builder.add_own(position, own[0])
        if k:
            builder.add_rows(*_tops(meta, len(ids)))
        if meta.output_top_logprobs:
            builder.add(len(ids) - 1, _entries(meta.output_top_logprobs[0]), None)
        return builder.scores()

    def complete(self, ids: Sequence[int], sampling: Sampling, replica: Replica | None = None) -> Continuation:
        """See `Engine.complete`."""
        own = {"max_new_tokens": sampling.max_tokens, "sampling_seed": sampling.seed % SEEDS}
        parameters = sampling.parameters() | own
        body = {"input_ids": list(ids), "sampling_params": parameters, "return_logprob": True}
        entries = len(ids) + 4 * sampling.max_tokens
        send = partial(self.pool.call, "POST", "/generate", decode=read_completion, entries=entries, replica=replica)
        meta = self._answer(partial(send, usable=self._is_current), body, "input_ids").meta_info
        tokens = [token for _, token, _ in meta.output_token_logprobs]
        values = tuple(value for value, _, _ in meta.output_token_logprobs if value is not None)
        check_length(values, len(tokens), "output_token_logprobs")
        stops = meta.finish_reason.type == "stop"
        return Continuation(tokens, stops, stops and isinstance(meta.finish_reason.matched, str), values)

    def load_weights(self, weights: Path | SharedWeights, version: str, replica: Replica) -> None:
        """See `Engine.load_weights`."""
        assert isinstance(weights, Path)  # settings say so
        body = {"model_path": str(weights), "flush_cache": True, "weight_version": version}
        for _ in range(LOADS):
            try:
                with self._paused(replica, "/pause_generation", "/continue_generation", {"mode": "abort"}):
                    self.pool.call("POST", "/update_weights_from_disk", body, decode=bytes, replica=replica)
            except BadRequestError as error:
                raise EngineRefusalError(f"{error}: let it see {weights} under the same path") from error
            if (served := self._version_of(replica)) == version:
                self._weights = weights, version
                return
        raise EngineRefusalError(
            f"{self.pool.field}.url: {replica.url} has loaded {weights} and names its weights {served!r}, not "
            f"{version!r}: use an SGLang that takes weight_version, and let no other run update this server"
        )

    def _is_current(self, answer: _Completion, replica: Replica) -> bool:
        """Return whether an answer is a whole completion of the last weights; let its server load them if not."""
        meta = answer.meta_info
        if self._weights is not None and meta.weight_version != self._weights[1]:
            directory, version = self._weights
            with self._reloading:
                if self._version_of(replica) != version:
                    log.warning(
                        "%s generates with the weights %r, not %r: has it been started again? Loading them",
                        replica.url,
                        self.pool.clean(str(meta.weight_version)),
                        version,
                    )
                    self.load_weights(directory, version, replica)
            return False
        return meta.finish_reason.type != "abort"

    def _version_of(self, replica: Replica) -> str | None:
        return self.pool.call("GET", "/model_info", decode=read_model, replica=replica).weight_version


def _tops(meta: _Scores, length: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the likeliest tokens and their log-probabilities, `[rows, n]`, and the position of the first row.

    Raises:
        EngineRefusalError: They are not those of a text of this length.
    """
    shape, skipped = meta.input_top_logprobs_shape, meta.input_top_logprobs_null_prefix
    if shape is None:
        raise EngineRefusalError("an answer lacks input_top_logprobs_shape: check url_engine, or use a newer SGLang")
    for name in ("input_top_logprobs_idx_flat_b64", "input_top_logprobs_val_flat_b64"):
        check_length(getattr(meta, name), 4 * shape[0] * shape[1], name)
    ids = np.frombuffer(meta.input_top_logprobs_idx_flat_b64, "<i4").reshape(shape)
    values = np.frombuffer(meta.input_top_logprobs_val_flat_b64, "<f4").reshape(shape)
    # The first token of a text is predicted by nothing.
    if skipped < 1 or skipped + len(ids) != length or (values > MAX_LOG_PROB).any():
        raise EngineRefusalError("input_top_logprobs of an answer is of another text: check url_engine")
    return skipped - 1, ids, values


def _entries(listed: list[Scored] | None) -> list[tuple[int, float]]:
    return [(token, value) for value, token, _ in listed or () if value is not None]
