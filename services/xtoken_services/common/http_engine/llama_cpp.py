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
from typing import Annotated

import msgspec
import numpy as np

from xtoken_core.alignment.tables import TEXT
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.http_engine.engine import Continuation, Engine, Sampling, ServedModel, read_tokens
from xtoken_services.common.http_engine.errors import EngineRefusalError, SampleRefusedError
from xtoken_services.common.http_engine.pool import EnginePool, Replica
from xtoken_services.common.http_engine.scores import LogProb, PromptScores, ScoresBuilder, check_length

EVENT = b"data: "
LIKELIEST = 1024
"""First tokens that are requested by themselves."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SEEDS = 1 << 31
"""Seeds of a request are below this."""


Named = dict[str, LogProb]
"""Log-probabilities of tokens by their texts."""


class _LogProbs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[LogProb | None]
    top_logprobs: list[Named | None]


class _Choice(msgspec.Struct):
    logprobs: _LogProbs
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = -1


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage = _Usage()


read_completion = msgspec.json.Decoder(_Completion).decode


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
        body, entries = {"input": text}, len(text)
        answer = self.pool.call("POST", "/extras/tokenize", body, decode=read_tokens, entries=entries, replica=replica)
        return answer.tokens

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
        entries = len(ids) * (k + 4)
        answer = self.pool.call(
            "POST", "/v1/completions", body, decode=read_completion, entries=entries, replica=replica
        )
        listed = answer.choices[0].logprobs
        tokens, values, tops = listed.tokens, listed.token_logprobs, listed.top_logprobs
        # Counted without the begin-of-text token, which is not repeated, and with a generated one or none.
        same = answer.usage.prompt_tokens == len(ids) and len(ids) - 1 <= len(tokens) <= len(ids)
        if not same or any(self._names.get(name, token) != token for name, token in zip(tokens, ids[1:], strict=False)):
            raise SampleRefusedError("the server tokenizes the text of a sample otherwise than its row")
        check_length(values, len(tokens), "token_logprobs")
        check_length(tops, len(tokens), "top_logprobs")
        builder = ScoresBuilder(len(ids), k, self.vocab_size)
        if len(ids) > 1:
            first = self._first_token(replica)
            builder.add(0, self._named(first), self._value_of(first, ids[1]))
        for position in range(1, len(tokens)):
            own = values[position] if position + 1 < len(ids) else None
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
        entries = len(ids) + 4 * sampling.max_tokens
        answer = self.pool.call(
            "POST", "/v1/completions", body, decode=read_completion, entries=entries, replica=replica
        )
        if answer.usage.prompt_tokens != len(ids):
            raise SampleRefusedError("the server tokenizes the text of a prompt otherwise than its row")
        choice = answer.choices[0]
        names = choice.logprobs.tokens
        tokens = [self._names.get(name) for name in names]
        if None in tokens:
            written = self._text.encode([choice.text], specials=False)[0].tolist()
            pieces = [self._text.table.pieces[token].decode("utf-8", errors="ignore") for token in written]
            tokens = written if pieces == names else tokens
        finished = choice.finish_reason == "stop"
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

    def _named(self, entries: Mapping[str, float] | None) -> list[tuple[int, float]]:
        return [(self._names[name], value) for name, value in (entries or {}).items() if name in self._names]

    def _value_of(self, entries: Mapping[str, float], token: int) -> float:
        """Return a token's log-probability in a distribution; without a name, that of an equal part of the rest."""
        name = self._text.table.pieces[token].decode("utf-8", errors="ignore")
        if self._names.get(name) == token and name in entries:
            return entries[name]
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
        answer = self.pool.call("POST", "/v1/completions", body, decode=first_event, entries=count, replica=replica)
        entries = answer.choices[0].logprobs.top_logprobs[:1] if answer else []
        if not entries or entries[0] is None:
            raise EngineRefusalError("an answer lacks the first token's log-probabilities: check url_engine")
        return entries[0]


def first_event(data: bytearray) -> _Completion | None:
    """Return the first event of an answer in server-sent events; None without one."""
    for line in bytes(data).splitlines():
        if line.startswith(EVENT):
            return read_completion(line.removeprefix(EVENT))
    return None
