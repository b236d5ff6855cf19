"""Check of servers before a run reads from them: that they run the model and the tokenizer that are meant."""

from __future__ import annotations

import logging

import numpy as np

from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.http_engine.engine import Engine
from xtoken_services.common.http_engine.errors import EngineRefusalError
from xtoken_services.common.http_engine.pool import Replica
from xtoken_services.common.http_engine.scores import PromptScores

log = logging.getLogger("xtoken.engine")

TEXTS = (
    "The quick brown fox, 12345.67 of them: Größe naïve 日本語 مرحبا 👍🏽\n\tdef f(x):\n        return x  # doubled\n",
    "Water boils at one hundred degrees, and freezes at zero. Rain falls in spring, snow in winter.",
)
"""A text that tokenizers cut differently, and one that is scored."""
MAX_DIFFERENCE = 0.25
"""Largest difference in nats between two answers about the same token: a server's batches differ by rounding, and
replicas may be quantised alike but run on other GPUs; another model differs by more."""
LEAST_LISTED = 0.5
"""Fraction of the wanted tokens that some position must list."""


def check_servers(engine: Engine, text: TextTokenizer, *, k: int, longest: int, own_suffices: bool) -> None:
    """Compare every server of a pool with a model's tokenizer and with the other servers.

    Args:
        engine: The servers.
        text: The tokenizer of the model that is meant.
        k: Tokens of a position that are wanted.
        longest: Tokens of the longest sample.
        own_suffices: The loss reads only the log-probability of the text's own tokens.

    Raises:
        EngineError: A server does not answer in time.
        EngineRefusalError: One runs something else, or cannot give what is wanted.
    """
    first: PromptScores | None = None
    for replica in engine.pool.replicas:
        model = engine.served(replica)
        where = f"{engine.pool.field}.url: {replica.url} ({model.name})"
        if model.max_length is not None and model.max_length <= longest:
            raise EngineRefusalError(
                f"{where} takes {model.max_length} tokens, one of them generated, and a sample may have {longest}: "
                "lower context_length, or start the server with more"
            )
        ids = _check_tokenizer(engine, text, replica, where)
        scores = engine.score(ids, k, replica)
        _check_listed(scores, ids, k, where, own_suffices=own_suffices)
        _check_shift(engine, ids, k, replica, where)
        if first is not None:
            difference = float(np.nanmax(np.abs(first.own - scores.own)))
            if difference > MAX_DIFFERENCE:
                raise EngineRefusalError(
                    f"{where} gives other log-probabilities than {engine.pool.replicas[0].url}, by {difference:.2f} "
                    "nats: let all servers run the same model"
                )
        first = first or scores
        log.info("%s: %.3f nats per token on a known text", where, -float(np.nanmean(scores.own)))


def _check_tokenizer(engine: Engine, text: TextTokenizer, replica: Replica, where: str) -> list[int]:
    """Compare the tokens of known texts; return those of the last."""
    for sample, own in zip(TEXTS, text.encode(TEXTS, specials=True), strict=True):
        before, after = text.ends
        served = engine.tokenize(sample, replica)
        ids: list[int] = own.tolist()
        # Some servers add the token that begins a text and not the one that ends it, or none: rows carry their own.
        bare = ids[len(before) : len(ids) - len(after)]
        if served not in (ids, bare, before + bare):
            raise EngineRefusalError(
                f"{where} tokenizes a known text into {len(served)} tokens, and the tokenizer of the run file into "
                f"{len(ids)}, or into other ones: let both have the same tokenizer"
            )
    return before + bare


def _check_listed(scores: PromptScores, ids: list[int], k: int, where: str, *, own_suffices: bool) -> None:
    """Refuse a server that lists too few tokens of a position for the loss."""
    if np.isnan(scores.own[:-1]).any():
        raise EngineRefusalError(f"{where} does not give the log-probability of every token of a text")
    if own_suffices:
        return
    only_own = k > 1 and scores.listed <= 1 and set(scores.ids[:-1, 0].tolist()) <= {-1, *ids[1:]}
    if only_own:
        raise EngineRefusalError(
            f"{where} gives only the log-probability of the text's own tokens: the loss compares distributions, and "
            'only loss.mode = "alm" needs no more'
        )
    if scores.listed < LEAST_LISTED * k:
        raise EngineRefusalError(
            f"{where} lists {scores.listed} tokens of a position, and {k} are wanted: lower topk, or start the server "
            "with a higher limit"
        )


def _check_shift(engine: Engine, ids: list[int], k: int, replica: Replica, where: str) -> None:
    """Refuse a server whose log-probabilities belong to the position before or after.

    The likeliest token after a text, as it generates it, has the same log-probability there and as part of a prompt.
    """
    if k < 1:
        return
    before = engine.score(ids[:-1], k, replica)
    likeliest, value = int(before.ids[-1, 0]), float(before.values[-1, 0])
    if likeliest < 0:
        return  # it has ended the text
    within = float(engine.score([*ids[:-1], likeliest], k, replica).own[len(ids) - 2])
    if abs(within - value) > MAX_DIFFERENCE:
        raise EngineRefusalError(
            f"{where} gives a token of a prompt {within:.2f} nats that it generates with {value:.2f}: its "
            "log-probabilities of prompts belong to other positions"
        )
