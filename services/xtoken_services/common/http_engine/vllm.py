"""vLLM: completions of no text, with the log-probabilities of the prompt (`prompt_logprobs`).

Written after the request and response models of 0.24.0. Not run yet. A server of a teacher needs `--max-logprobs` of at
least `teacher.topk`; its default is 20. One that generates reads new weights by `reload_weights` of its workers, from
the directory that it was started with, which takes `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from xtoken_services.common.http_engine.engine import Continuation, Engine, Sampling
from xtoken_services.common.http_engine.errors import EngineRefusalError
from xtoken_services.common.http_engine.pool import Replica
from xtoken_services.common.http_engine.scores import (
    LogProb,
    PromptScores,
    ScoresBuilder,
    TokenId,
    check_length,
    token_id,
)


class _Entry(msgspec.Struct):
    logprob: LogProb


class _Generated(msgspec.Struct):
    """Generated tokens, named `token_id:N` by `return_tokens_as_token_ids`."""

    tokens: list[str] | None = None
    token_logprobs: list[LogProb] = []
    top_logprobs: list[dict[str, LogProb] | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Generated | None = None
    prompt_logprobs: list[dict[TokenId, _Entry] | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


read_completion = msgspec.json.Decoder(_Completion).decode


class VllmEngine(Engine):
    """vLLM."""

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
        for position, (token, entries) in enumerate(zip(ids[1:], listed[1:], strict=True)):
            if entries is None or token not in entries:
                raise EngineRefusalError("prompt_logprobs of an answer lacks the text's own token: check url_engine")
            values = [(name, entry.logprob) for name, entry in entries.items()]
            builder.add(position, values, entries[token].logprob)
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
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # What is left out the server takes from the model's generation_config.json: completions would be no samples
            # of the student.
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": sampling.seed,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        choice = self._completion(body, len(ids) + 4 * sampling.max_tokens, replica)
        names = choice.logprobs.tokens if choice.logprobs else None
        tokens = [token_id(name) for name in names or ()]
        if names is None or min(tokens, default=0) < 0:
            raise EngineRefusalError("logprobs of an answer lacks the ids of its tokens: check url_engine")
        values = tuple(choice.logprobs.token_logprobs) if choice.logprobs else ()
        check_length(values, len(tokens), "token_logprobs")
        return Continuation(tokens, choice.finish_reason == "stop", isinstance(choice.stop_reason, str), values)

    def load_weights(self, directory: Path, version: str, replica: Replica) -> None:
        """See `Engine.load_weights`; the server must have been started with this directory, in development mode.

        Its answers name no version. One that is started again reads the last weights, if it reads this directory.
        """
        root = self.served(replica).root
        if root is not None and Path(root).parts[-2:] != directory.parts[-2:]:
            raise EngineRefusalError(
                f"{self.pool.field}.url: {replica.url} was started with {self.pool.clean(root)}: start it with "
                f"{directory}, so that it has the last weights if it is started again"
            )
        with self._paused(replica, "/pause?mode=wait", "/resume"):
            self.pool.call("POST", "/collective_rpc", {"method": "reload_weights"}, decode=bytes, replica=replica)
            self.pool.call("POST", "/reset_prefix_cache", decode=bytes, replica=replica)

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
