"""SGLang: its own `/generate`, with the log-probabilities of the input.

Written from its documentation (native APIs, sampling parameters). Not run yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xtoken_services.common.http_engine.engine import Continuation, IdsEngine, Sampling
from xtoken_services.common.http_engine.errors import EngineRefusalError
from xtoken_services.common.http_engine.pool import Replica
from xtoken_services.common.http_engine.scores import PromptScores, ScoresBuilder, items, log_prob, member, token_id

SEEDS = 1 << 31
"""Seeds of a request are below this. They count only if the server was started for deterministic inference."""


class SglangEngine(IdsEngine):
    """SGLang."""

    def score(self, ids: Sequence[int], k: int, replica: Replica | None = None) -> PromptScores:
        """See `Engine.score`."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
        }
        meta = member(self.pool.call("POST", "/generate", body, replica=replica), "meta_info")
        own = items(member(meta, "input_token_logprobs"), len(ids), "input_token_logprobs")
        tops = items(member(meta, "input_top_logprobs"), len(ids), "input_top_logprobs") if k else [[]] * len(ids)
        builder = ScoresBuilder(len(ids), k, self.vocab_size)
        for position, (token, entry, entries) in enumerate(zip(ids[1:], own[1:], tops[1:], strict=True)):
            read, value = _entry(entry, "input_token_logprobs")
            if read != token:
                raise EngineRefusalError("input_token_logprobs of an answer is of other tokens: check url_engine")
            builder.add(position, [_entry(one, "input_top_logprobs") for one in entries or ()], value)
        after = meta.get("output_top_logprobs")
        if after:
            builder.add(len(ids) - 1, [_entry(one, "output_top_logprobs") for one in after[0] or ()], None)
        return builder.scores()

    def complete(self, ids: Sequence[int], sampling: Sampling, replica: Replica | None = None) -> Continuation:
        """See `Engine.complete`."""
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            # Left out, both may be the defaults of the model's generation_config.json.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": sampling.seed % SEEDS,
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        body = {"input_ids": list(ids), "sampling_params": parameters, "return_logprob": True}
        meta = member(self.pool.call("POST", "/generate", body, replica=replica), "meta_info")
        entries = member(meta, "output_token_logprobs")
        tokens = [_entry(one, "output_token_logprobs")[0] for one in items(entries, len(entries), "tokens")]
        reason = member(meta, "finish_reason")
        stops = member(reason, "type") == "stop"
        return Continuation(tokens, stops, stops and isinstance(reason.get("matched"), str))

    def load_weights(self, directory: Path, replica: Replica) -> None:
        """See `Engine.load_weights`."""
        body = {"model_path": str(directory), "flush_cache": True}
        answer = self.pool.call("POST", "/update_weights_from_disk", body, replica=replica)
        if member(answer, "success") is not True:
            raise EngineRefusalError(
                f"{self.pool.field}.url: {replica.url} has not loaded {directory}: {str(answer.get('message'))[:200]}: "
                "let it see the run's output directory under the same path"
            )


def _entry(entry: Any, where: str) -> tuple[int, float]:
    """Return token and log-probability of an entry `[logprob, id, text]`."""
    return token_id(member(entry, 1), where), log_prob(member(entry, 0), where)
