"""A teacher that another program serves over HTTP: its servers are checked, its answers written into a ring's slots."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from xtoken_core.errors import InputError
from xtoken_core.evaluation import EvalResult, read_windows, result_of
from xtoken_core.served_requests import RequestCounts
from xtoken_core.tokenizing import TextTokenizer
from xtoken_core.topk_logits import TopKLogits, write_topk
from xtoken_core.transports.ring import TopKSettings
from xtoken_services.common.http_engine.engine import Engine
from xtoken_services.common.http_engine.errors import EngineRefusalError, SampleRefusedError
from xtoken_services.common.http_engine.pool import Replica
from xtoken_services.common.http_engine.results import results_of
from xtoken_services.common.http_engine.scores import PromptScores
from xtoken_services.teacher.base import HeldOutText, RefusedSamplesError, Teacher, TeacherBatch

log = logging.getLogger("xtoken.teacher")
LEAST_REST = 1e-7
"""Smallest mass of the tokens that a server does not list: it is a difference from 1 of numbers rounded to float32."""
THREADS = 256
"""Most requests that a worker waits for."""
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


class ServedTeacher(Teacher):
    """A model behind one or several servers.

    Args:
        engine: Its servers.
        device: Device of the slots.
        settings: What is sent of each position.
        head_width: Rows of its head.
    """

    plain_head = False

    def __init__(self, engine: Engine, device: torch.device, settings: TopKSettings, head_width: int) -> None:
        self.engine, self.device, self.settings, self.head_width = engine, device, settings, head_width
        pool = engine.pool
        self._threads = ThreadPoolExecutor(min(len(pool.replicas) * pool.limit, THREADS), thread_name_prefix="engine")
        self._waited_s = 0.0
        self._reported = RequestCounts()
        self._scores: dict[tuple[int, ...], PromptScores | SampleRefusedError] = {}

    def _fill(self, batch: TeacherBatch, view: Tensor, maxima: Tensor | None) -> None:
        """Write the servers' answers. They are kept until the next micro-batch: one that is refused comes again."""
        samples = [tuple(ids.tolist()) for ids in batch.unpadded()]
        wanted = [ids for ids in dict.fromkeys(samples) if ids not in self._scores]
        known = {ids: self._scores[ids] for ids in samples if ids in self._scores}

        def waiting(answered: int) -> None:
            self.report(f"waiting for servers: {answered} of {len(wanted)} samples answered")

        self._scores = known | dict(zip(wanted, self.score(wanted, waiting), strict=True))
        self.report("")
        made = dict(zip(batch.positions, (self._scores[ids] for ids in samples), strict=True))
        scores = {position: one for position, one in made.items() if isinstance(one, PromptScores)}
        if refused := made.keys() - scores:
            raise RefusedSamplesError(sorted(refused), f"{self.name}: {made[min(refused)]}")
        view.copy_(self.rows(list(scores.values()), batch.parts(), view.shape))

    def evaluate(self, text: HeldOutText) -> EvalResult:
        """See `Teacher.evaluate`."""
        # A request is a window with its last target, which must fit the server too.
        length = text.context_length - 1
        windows, sizes = read_windows(text.tokenizer, text.documents, context_length=length, max_bytes=text.max_bytes)
        nats, hits = [0.0] * len(sizes), 0

        def waiting(answered: int) -> None:
            self.report(f"measuring the held-out text: {answered} of {len(windows)} windows answered")

        made = self.score([[*window.inputs, window.targets[-1]] for window in windows], waiting, k=1)
        for window, scores in zip(windows, made, strict=True):
            if isinstance(scores, SampleRefusedError):
                raise InputError(str(scores))
            part = slice(len(window.skipped), len(window.inputs))
            nats[window.document] -= float(scores.own[part].sum())
            hits += int((scores.ids[part, 0] == window.targets).sum())
        if any(map(math.isnan, nats)):
            raise InputError("its servers do not give the log-probability of every token of the text")
        return result_of(nats, hits, sum(len(window.targets) for window in windows), sizes)

    def score(
        self, samples: Sequence[Sequence[int]], alive: Callable[[int], None], k: int | None = None
    ) -> list[PromptScores | SampleRefusedError]:
        """Return the scores of some samples, or why one has none; of an empty one, an empty array.

        Args:
            samples: Token ids.
            alive: Called while it waits, with the number of samples that are answered; what it raises ends the wait.
            k: Tokens of a position; None: as many as are sent.

        Raises:
            EngineError: No server has answered in time.
            EngineRefusalError: A server refuses a request.
        """
        began = time.monotonic()
        k = self.settings.k if k is None else k
        futures = [self._threads.submit(self._score, list(ids), k) for ids in samples]
        try:
            return results_of(futures, alive)
        finally:
            self._waited_s += time.monotonic() - began

    def rows(self, scores: Sequence[PromptScores], parts: Sequence[tuple[int, slice]], shape: torch.Size) -> Tensor:
        """Return samples' scores as a slot has them, `[rows, width, W]` on the host; other positions list nothing.

        Args:
            scores: Of each sample.
            parts: Row and positions of each.
            shape: The slot's.
        """
        k = self.settings.k
        rows = torch.empty(shape, dtype=torch.float32)
        none = PromptScores(np.full((1, k), -1, dtype=np.int64), np.full((1, k), -np.inf), np.zeros(1))
        filler = rows.new_empty(1, 1, shape[-1])
        write_topk(topk_of(none, self.settings), filler)
        rows.copy_(filler)
        for made, (row, part) in zip(scores, parts, strict=True):
            if len(made.own):
                write_topk(topk_of(made, self.settings), rows[row : row + 1, part])
        return rows

    def new_requests(self) -> RequestCounts:
        """Return the counts since the last call."""
        pool = self.engine.pool
        total = RequestCounts(pool.requests, pool.retries, pool.received, self._waited_s)
        since, self._reported = total.less(self._reported), total
        return since

    def close(self) -> None:
        """Log the number of requests, and end the connections and threads."""
        pool = self.engine.pool
        log.info("%d requests were answered, %d bytes, %d repeated", pool.requests, pool.received, pool.retries)
        self.engine.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, ids: list[int], k: int) -> PromptScores | SampleRefusedError:
        if not ids:
            return PromptScores(np.zeros((0, k), dtype=np.int64), np.zeros((0, k)), np.zeros(0))
        try:
            return self.engine.score(ids, k)
        except SampleRefusedError as error:
            return error


def topk_of(scores: PromptScores, settings: TopKSettings) -> TopKLogits:
    """Return a server's scores as largest logits `[1, T, k]`: log-probabilities, with a log-normaliser of 0.

    The mass of the tokens that are not listed is 1 less that of the others. The last position, which predicts nothing,
    repeats the one before it if the server has not generated a token.

    Args:
        scores: Of a sample of at least one token.
        settings: What is sent of each position.
    """
    ids, values, own = (torch.from_numpy(array.copy()) for array in (scores.ids, scores.values, scores.own))
    T, k = ids.shape
    if T > 1 and bool((ids[-1] < 0).all()):
        ids[-1], values[-1] = ids[-2], values[-2]
    masses = values.exp()
    whole = bool(k >= settings.vocab_size) and bool((ids >= 0).all())
    log_rest = torch.full((T,), -torch.inf) if whole else (1.0 - masses.sum(-1)).clamp(min=LEAST_REST, max=1.0).log()
    own = own.nan_to_num(nan=0.0, neginf=-1e4)
    ids, zero = ids.unsqueeze(0), torch.zeros(1, T)
    values, log_rest, own = (part.float().unsqueeze(0) for part in (values, log_rest, own))
    return TopKLogits(ids, values, zero, zero, log_rest, own, settings.vocab_size)


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
