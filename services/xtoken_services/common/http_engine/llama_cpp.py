"""The server of llama-cpp-python: completions that repeat a prompt (`echo`), with log-probabilities by tokens' texts.

Three of its habits shape this module. It takes text and tokenizes it itself, so that a sample which it would tokenize
otherwise is refused. It names tokens by their texts: those that several tokens have, such as parts of characters, count
as not listed; a character's is taken for that of its own token, not of its byte. It leaves out the first token after
the begin-of-text token, whose distribution is the same for every sample, and is requested once, as that of a completion
of nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import msgspec
import numpy as np

from xtoken_core.alignment.tables import TEXT
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.http_engine.engine import Continuation, Engine, Sampling, ServedModel
from xtoken_services.common.http_engine.errors import EngineRefusalError, SampleRefusedError
from xtoken_services.common.http_engine.pool import EnginePool, Replica
from xtoken_services.common.http_engine.scores import PromptScores, ScoresBuilder, items, log_prob, member, token_id

EVENT = b"data: "
LIKELIEST = 1024
"""First tokens that are requested by themselves."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SEEDS = 1 << 31
"""Seeds of a request are below this."""


class LlamaCppEngine(Engine):
    """The server of llama-cpp-python, of a model whose texts begin with a begin-of-text token.

    Args:
        pool: As for `Engine`.
        model: Likewise.
        vocab_size: Likewise.
        text: The model's tokenizer.
    """

    takes_ids = False

    def __init__(self, pool: EnginePool, model: str | None, vocab_size: int, text: TextTokenizer) -> None:
        super().__init__(pool, model, vocab_size)
        self._text = text
        self._lock = Lock()
        self._first: dict[str, float] | None = None

    def served(self, replica: Replica) -> ServedModel:
        """See `Engine.served`."""
        if len(self._text.ends[0]) != 1:
            raise EngineRefusalError(
                f"{self.pool.field}.url: llama-cpp-python gives right log-probabilities of prompts only for models "
                "whose texts begin with a begin-of-text token: let another program serve this one"
            )
        return super().served(replica)

    def tokenize(self, text: str, replica: Replica) -> list[int]:
        """See `Engine.tokenize`."""
        tokens = member(self.pool.call("POST", "/extras/tokenize", {"input": text}, replica=replica), "tokens")
        return [token_id(token, "tokens") for token in items(tokens, len(tokens), "tokens")]

    def score(self, ids: Sequence[int], k: int, replica: Replica | None = None) -> PromptScores:
        """See `Engine.score`."""
        ids = list(ids)
        if ids[:1] != self._text.ends[0]:
            raise SampleRefusedError("a sample does not begin with the begin-of-text token that the server adds")
        body = {
            "model": self.name,
            "prompt": self._text.tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False),
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": k,
        }
        answer = self.pool.call("POST", "/v1/completions", body, replica=replica)
        listed = member(answer, "choices", 0, "logprobs")
        tokens = member(listed, "tokens")
        # Counted without the begin-of-text token, which is not repeated, and with a generated one or none.
        same = member(answer, "usage", "prompt_tokens") == len(ids) and len(ids) - 1 <= len(tokens) <= len(ids)
        if not same or any(self._names.get(name, token) != token for name, token in zip(tokens, ids[1:], strict=False)):
            raise SampleRefusedError("the server tokenizes the text of a sample otherwise than its row")
        values = items(member(listed, "token_logprobs"), len(tokens), "token_logprobs")
        tops = items(member(listed, "top_logprobs"), len(tokens), "top_logprobs")
        builder = ScoresBuilder(len(ids), k, self.vocab_size)
        if len(ids) > 1:
            first = self._first_token(replica)
            builder.add(0, self._named(first), self._value_of(first, ids[1]))
        for position in range(1, len(tokens)):
            own = log_prob(values[position], "token_logprobs") if position + 1 < len(ids) else None
            builder.add(position, self._named(tops[position]), own)
        return builder.scores()

    def complete(self, ids: Sequence[int], sampling: Sampling, replica: Replica | None = None) -> Continuation:
        """See `Engine.complete`; a completion is refused if the texts of its tokens leave open what they are.

        Where several tokens have a text, such as a letter and its byte, they are those that the tokenizer writes for
        the completion, if their texts are the same one after the other.
        """
        ids = list(ids)
        if ids[:1] != self._text.ends[0]:
            raise SampleRefusedError("a prompt does not begin with the begin-of-text token that the server adds")
        body = {
            "model": self.name,
            "prompt": self._text.tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0 if sampling.top_k is None else sampling.top_k,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "seed": sampling.seed % SEEDS,
            "logprobs": 1,
            "stop": list(sampling.stop),
        }
        answer = self.pool.call("POST", "/v1/completions", body, replica=replica)
        if member(answer, "usage", "prompt_tokens") != len(ids):
            raise SampleRefusedError("the server tokenizes the text of a prompt otherwise than its row")
        choice = member(answer, "choices", 0)
        names = member(choice, "logprobs", "tokens")
        tokens = [self._names.get(name) for name in items(names, len(names), "tokens")]
        if None in tokens:
            written = self._text.encode([str(member(choice, "text"))], specials=False)[0].tolist()
            pieces = [self._text.table.pieces[token].decode("utf-8", errors="ignore") for token in written]
            tokens = written if pieces == names else tokens
        finished = choice.get("finish_reason") == "stop"
        if finished and not sampling.stop and self._text.eos_id is not None:
            tokens.append(self._text.eos_id)
        if None in tokens:
            raise SampleRefusedError("the texts of a completion's tokens leave open what they are")
        return Continuation(
            [token for token in tokens if token is not None], finished, finished and bool(sampling.stop)
        )

    @cached_property
    def _names(self) -> dict[str, int]:
        """Tokens by their texts, those that only one token has; tokens of a byte, which models do not use, apart."""
        table, strings = self._text.table, self._text.tokenizer.convert_ids_to_tokens(range(self.vocab_size))
        texts = {
            token: piece.decode("utf-8", errors="ignore")
            for token, piece in enumerate(table.pieces[: self.vocab_size])
            if table.kinds[token] == TEXT and not _BYTE.fullmatch(strings[token] or "")
        }
        counts = Counter(texts.values())
        return {text: token for token, text in texts.items() if text and counts[text] == 1}

    def _named(self, entries: Any) -> list[tuple[int, float]]:
        if not isinstance(entries, Mapping):
            return []
        return [
            (self._names[name], log_prob(value, "top_logprobs"))
            for name, value in entries.items()
            if name in self._names
        ]

    def _value_of(self, entries: Mapping[str, float], token: int) -> float:
        """Return a token's log-probability in a distribution; without a name, that of an equal part of the rest."""
        name = self._text.table.pieces[token].decode("utf-8", errors="ignore")
        if self._names.get(name) == token and name in entries:
            return log_prob(entries[name], "top_logprobs")
        named = self._named(entries)
        rest = 1.0 - float(np.exp([value for _, value in named]).sum())
        return math.log(max(rest, 1e-7) / max(self.vocab_size - len(named), 1))

    def _first_token(self, replica: Replica | None) -> dict[str, float]:
        """Return the distribution of the first token, by name, which is requested once.

        Only the answer in events has it: without them the program drops the first token of a completion of nothing. Of
        all tokens with one text it names the least likely, so that the likeliest are requested once more.
        """
        with self._lock:
            if self._first is None:
                self._first = {}
                for count in (self.vocab_size, min(LIKELIEST, self.vocab_size)):
                    self._first |= self._first_tokens(count, replica)
            return self._first

    def _first_tokens(self, count: int, replica: Replica | None) -> Mapping[str, float]:
        body = {
            "model": self.name,
            "prompt": "",
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
            "logprobs": count,
        }
        answer = self.pool.call("POST", "/v1/completions", body, replica=replica, decode=first_event)
        entries = member(answer, "choices", 0, "logprobs", "top_logprobs", 0)
        if not isinstance(entries, Mapping):
            raise EngineRefusalError("an answer lacks the first token's log-probabilities: check url_engine")
        return entries


def first_event(data: bytearray) -> Any:
    """Return the first event of an answer in server-sent events, read as JSON."""
    for line in bytes(data).splitlines():
        if line.startswith(EVENT):
            return msgspec.json.decode(line.removeprefix(EVENT))
    return None
