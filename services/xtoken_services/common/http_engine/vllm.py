"""vLLM: completions of no text, with the log-probabilities of the prompt (`prompt_logprobs`).

Written from its documentation (Completions API of the OpenAI-compatible server, sleep mode). Not run
yet. A server of a teacher needs `--max-logprobs` of at least `teacher.topk`; its
default is 20. One that generates reads new weights by `reload_weights` of its workers, from the directory that it was
started with, which takes `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xtoken_services.common.http_engine.engine import Continuation, IdsEngine, Sampling
from xtoken_services.common.http_engine.errors import EngineRefusalError
from xtoken_services.common.http_engine.pool import Replica
from xtoken_services.common.http_engine.scores import PromptScores, ScoresBuilder, items, log_prob, member, token_id

ID_PREFIX = "token_id:"
"""Beginning of a token's name with `return_tokens_as_token_ids`."""


class VllmEngine(IdsEngine):
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
        choice = member(self.pool.call("POST", "/v1/completions", body, replica=replica), "choices", 0)
        builder = ScoresBuilder(len(ids), k, self.vocab_size)
        listed = items(member(choice, "prompt_logprobs"), len(ids), "prompt_logprobs")
        for position, (token, entries) in enumerate(zip(ids[1:], listed[1:], strict=True)):
            builder.add(position, *_entries(entries, token))
        generated = choice.get("logprobs")
        if generated and generated.get("top_logprobs"):
            builder.add(len(ids) - 1, _named(generated["top_logprobs"][0]), None)
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
            "seed": sampling.seed,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        choice = member(self.pool.call("POST", "/v1/completions", body, replica=replica), "choices", 0)
        names = member(choice, "logprobs", "tokens")
        tokens = [token_id(str(name).removeprefix(ID_PREFIX), "tokens") for name in items(names, len(names), "tokens")]
        stopped = isinstance(choice.get("stop_reason"), str)
        return Continuation(tokens, choice.get("finish_reason") == "stop", stopped)

    def load_weights(self, directory: Path, replica: Replica) -> None:
        """See `Engine.load_weights`; the server must have been started with this directory, in development mode."""
        self.pool.call("POST", "/collective_rpc", {"method": "reload_weights"}, replica=replica, decode=bytes)
        self.pool.call("POST", "/reset_prefix_cache", replica=replica, decode=bytes)


def _entries(entries: Any, own: int) -> tuple[list[tuple[int, float]], float]:
    """Return a position's tokens, and the log-probability of the text's own, which is always among them."""
    if not isinstance(entries, Mapping) or str(own) not in entries:
        raise EngineRefusalError("prompt_logprobs of an answer lacks the text's own token: check url_engine")
    read = {
        token_id(name, "prompt_logprobs"): log_prob(member(entry, "logprob"), "prompt_logprobs")
        for name, entry in entries.items()
    }
    return list(read.items()), read[own]


def _named(entries: Any) -> list[tuple[int, float]]:
    """Return the likeliest tokens after the text, named `token_id:N`."""
    if not isinstance(entries, Mapping):
        return []
    return [
        (token_id(name.removeprefix(ID_PREFIX), "top_logprobs"), log_prob(value, "top_logprobs"))
        for name, value in entries.items()
    ]
