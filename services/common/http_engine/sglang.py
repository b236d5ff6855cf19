"""SGLang: its own `/generate`, with the log-probabilities of the input.

Written from its documentation (native APIs, sampling parameters). It has not been run: SGLang cannot be installed where
this was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.http_engine.engine import IdsEngine
from services.common.http_engine.errors import EngineRefusalError
from services.common.http_engine.pool import Replica
from services.common.http_engine.scores import PromptScores, ScoresBuilder, items, log_prob, member, token_id


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


def _entry(entry: Any, where: str) -> tuple[int, float]:
    """Return token and log-probability of an entry `[logprob, id, text]`."""
    return token_id(member(entry, 1), where), log_prob(member(entry, 0), where)
