"""`xtoken rollout`: connect to a queue and complete prompts with the student's published weights until the run ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from xtoken_core.collate_generated import OF_COMPLETION, Completion, CompletionCollator
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.routing import RouteError
from xtoken_core.dataset import BadRecord, TextIndex
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.losses.masks import loss_counts
from xtoken_core.queue.run.names import ROLLOUT
from xtoken_core.regular_files import read_json_object
from xtoken_core.tasks import answered_prompt
from xtoken_core.tokenizing import ConversationError, TextTokenizer, UnspellableError
from xtoken_core.wire import QueueError
from xtoken_core.wire.messages import Block
from xtoken_services.common.generation.decoding import Decoder
from xtoken_services.common.generation.published_weights import Version, read_version, weights_file
from xtoken_services.common.generation.sampling import Sampler, Sampling, seed_of, spelled_text
from xtoken_services.common.generation.vocabulary import end_tokens, vocabulary_of
from xtoken_services.common.http_engine.factory import open_engine
from xtoken_services.common.models.loading import head_width, load_model, pick_device
from xtoken_services.common.processes.worker import QueueLink, Worker, worker_session
from xtoken_services.common.text.collation import (
    HOW_TO_SKIP,
    MAX_REASON,
    collator_of,
    end_run,
    open_data,
    serve_blocks,
    value_with_route,
)
from xtoken_services.common.text.prompts import encoded_prompt, look_at_prompts
from xtoken_services.common.text.run_order import record_of
from xtoken_services.rollout.served import MODEL, ServedSampler

log = logging.getLogger("xtoken.rollout")
QUIET_S = 10.0
"""Seconds without the weights before the log says why; in a run a version is written within less."""
POLL_S = 0.2


def work(link: QueueLink, *, rank: int, name: str | None) -> None:
    """Complete prompts until the run ends.

    Raises:
        ConfigError: The run has no rollouts, or its data has changed.
        InputError: The model, a tokenizer, the data or the published weights cannot be read, or a record is bad and
            `on_bad_record` is "fail".
    """
    with worker_session(link, role=ROLLOUT, name=name or f"rollout-{rank}") as worker:
        run = worker.run
        if run.spec.rollout is None:
            raise ConfigError(f"the run {run.spec.name!r} has no [rollout]: it takes no rollout worker")
        device = pick_device(run.spec.workers.device, run.spec.rollout_gpu(rank) % max(torch.cuda.device_count(), 1))
        if device.type == "cpu":
            torch.use_deterministic_algorithms(True)
        worker.activity("loading tokenizers")
        collator = collator_of(CompletionCollator, run)
        index = open_data(run)
        if not run.spec.has_text:  # of text a collator looks at a sample
            try:
                look_at_prompts(run.spec, collator.student, index)
            except InputError as error:
                end_run(worker, str(error))
        worker.activity("loading the student")
        sampler = make_sampler(run, collator.student, device)
        loop = RolloutLoop(worker, sampler, collator, index)
        worker.phase("run")
        loop.serve()


class RolloutLoop:
    """The rollout worker's main loop: lease a block of prompts, load the weights, sample, collate, put."""

    def __init__(
        self, worker: Worker, sampler: Sampler | ServedSampler, collator: CompletionCollator, index: TextIndex
    ) -> None:
        self.worker, self.queue, self.run = worker, worker.queue, worker.run
        self.sampler, self.collator, self.index = sampler, collator, index
        assert self.run.spec.rollout is not None
        self.settings = self.run.spec.rollout
        self.counts = loss_counts(self.run.spec.loss, self.run.same_tokenizer)
        self.vocabulary = sampler.vocabulary
        self._file = weights_file(self.run)
        self._loaded: Version | None = None
        self._idle_since = time.monotonic()
        self._unjudged = False

    def serve(self) -> None:
        """Complete prompts until the run ends."""
        serve_blocks(self.worker, self._complete)

    def _complete(self, block: Block) -> None:
        """Store a row or a tombstone for each position of a block."""
        version = self._load(block)
        prompts, tombstones = self._prompts(block)
        began = time.monotonic()
        waited = began - self._idle_since
        seeds = [seed_of(self.run.spec.seed, position, version.step) for position in prompts]
        ids = [ids for _, ids in prompts.values()]
        sampled = self.sampler.complete(ids, seeds, self._progress) if prompts else []
        times = [int(seconds * 1e6 / max(len(prompts), 1)) for seconds in (time.monotonic() - began, waited)]
        completions: dict[int, Completion] = {}
        for (position, (prompt, prompt_ids)), row in zip(prompts.items(), sampled, strict=True):
            body = row.ids[:-1] if row.ends else row.ids
            count, text = spelled_text(body, self.vocabulary.pieces)
            whole = count == len(body)
            ends = row.ends and whole
            kept = torch.tensor(row.ids if whole else body[:count], dtype=torch.int64).numpy()
            if not len(kept):
                tombstones[position] = "the completion holds no valid text"
                continue
            entropy = row.entropy * len(kept) / max(len(row.ids), 1)
            completions[position] = Completion(
                prompt,
                prompt_ids,
                kept,
                text,
                ends,
                row.finished and whole,
                version.step,
                entropy=entropy,
                microseconds=times[0],
                waited=times[1],
                right=self._is_right(prompt, text),
                log_probs=row.log_probs[: len(kept)] if self.run.spec.loss.importance_cap is not None else None,
            )
        positions = list(completions)
        rows = self.collator.completion_rows(list(completions.values()), self.counts)
        refused = {
            positions[index]: f"{self.index.location(record_of(self.run, positions[index]))}: {reason}"
            for index, reason in rows.refused.items()
        }
        # A completion is no record's fault: the student writes what it likes.
        self._end_if_bad({at: reason for at, reason in refused.items() if OF_COMPLETION not in reason})
        tombstones |= refused
        for position, reason in tombstones.items():
            log.warning("position %d is skipped: %s", position, reason)
        short = {position: reason[:MAX_REASON] for position, reason in tombstones.items()}
        self.queue.put_block(block.lease, [positions[index] for index in rows.records], rows.columns, short)
        self.worker.alive(1)
        self._idle_since = time.monotonic()

    def _is_right(self, prompt: Mapping[str, Any], completion: str) -> bool | None:
        """Return whether a completion gives the answer beside its prompt; None if none is there to judge by."""
        if "answer" not in prompt:
            return None
        tasks = self.run.spec.eval.tasks if self.run.spec.eval is not None else None
        try:
            return answered_prompt(prompt, tasks.match if tasks is not None else "exact").is_right(completion)
        except ValueError as error:
            if not self._unjudged:
                log.warning("records whose completions are not judged (completion_accuracy), such as one: %s", error)
            self._unjudged = True
            return None

    def _progress(self, answered: int | None = None) -> None:
        """Report a token of this process's model, or how many prompts servers have answered so far."""
        self.worker.alive() if answered is None else self.worker.waiting(answered)

    def _load(self, block: Block) -> Version:
        """Load the published weights if there are newer ones; return their version.

        Raises:
            QueueError: `lease_revoked` if they are of another rewind than the block.
            InputError: There are none for as long as a worker may load: a trainer that has ended is back by then.
        """
        began, limit, warned = time.monotonic(), self.run.spec.workers.hang_timeout_s, False
        while True:
            try:
                version = read_version(self._file)
                if version != self._loaded:
                    self._loaded = None  # a failure in between leaves a mixture
                    self._loaded = version = self.sampler.load(self._file)
                    log.info("generating with the weights of step %d", version.step)
                error = InputError(
                    f"the published weights {self._file} are of another trainer than the queue's: end that trainer"
                )
            except InputError as reason:  # its trainer has ended, and a sweep removed it: another one will publish
                error = reason
            else:
                if version.tag == block.tag and version.step >= block.version:
                    return version
            waited = time.monotonic() - began
            if waited > limit:
                raise error
            if waited > QUIET_S and not warned:
                warned = True
                log.warning("waiting for weights: %s", error)
            self._check_lease(block)
            self.worker.alive()
            time.sleep(POLL_S)

    def _check_lease(self, block: Block) -> None:
        """Refuse a block that was leased before a rewind.

        Raises:
            QueueError: `lease_revoked`.
        """
        published = self.worker.client.stats()["partitions"][self.run.spec.name]["run"]["weights_tag"]
        if published != block.tag:
            raise QueueError("lease_revoked", f"block lease {block.lease} was revoked by a rewind")

    def _prompts(self, block: Block) -> tuple[dict[int, tuple[dict[str, Any], Any]], dict[int, str]]:
        """Return each position's prompt with its tokens, and the positions without one with the reason."""
        run = self.run
        positions = range(block.first, block.first + block.count)
        numbers = [record_of(run, position) for position in positions]
        prompts: dict[int, tuple[dict[str, Any], Any]] = {}
        tombstones: dict[int, str] = {}
        for position, record in zip(positions, self.index.read(numbers), strict=True):
            if isinstance(record, BadRecord):
                tombstones[position] = f"{record.location}: {record.reason}"
                continue
            try:
                value = value_with_route(run, self.index, record)
                prompts[position] = encoded_prompt(value, self.collator.student, run.spec)
            except (ConversationError, UnspellableError, RouteError) as error:
                tombstones[position] = f"{self.index.location(record.number)}: {error}"
        self._end_if_bad(tombstones)
        return prompts, tombstones

    def _end_if_bad(self, refused: dict[int, str]) -> None:
        """End the run if positions have bad records and `on_bad_record` is "fail".

        Args:
            refused: By position, what is bad about its record.

        Raises:
            InputError: The run is ended.
        """
        if refused and self.run.spec.data.on_bad_record == "fail":
            position, reason = next(iter(refused.items()))
            end_run(self.worker, f"bad record at position {position}: {reason} ({HOW_TO_SKIP})")


def make_sampler(run: ResolvedRun, tokenizer: TextTokenizer, device: torch.device) -> Sampler | ServedSampler:
    """Return the sampler of a run: a model of this process, or servers.

    Raises:
        ConfigError: The student's tokens do not spell the text as it is, or a server's address is not allowed.
        InputError: The model or a server's key cannot be read.
    """
    spec = run.spec
    assert spec.rollout is not None
    by = spec.rollout.url_weights
    if by != "directory" and device.type != "cuda":
        raise ConfigError(f'rollout.url_weights = "{by}" needs a GPU for the rollout worker: set it to "directory"')
    if device.type == "cuda" and spec.rollout.loads_model:
        torch.cuda.set_device(device)
    model = load_model(spec.student, "student", device).eval() if spec.rollout.loads_model else None  # type: ignore[no-untyped-call]
    if spec.rollout.url:
        engine = open_engine(spec.rollout, "rollout", run.student.vocab_size)
        file = spec.student.model / "generation_config.json"
        defaults = read_json_object(file).get("eos_token_id") if file.is_file() else None
        vocabulary = vocabulary_of(tokenizer, defaults, width=run.student.vocab_size)
        student, longest = spec.student, spec.student.context_length
        directory, gpu = spec.output / MODEL, str(device) if by == "nccl" else None
        return ServedSampler(
            engine, vocabulary, spec.rollout, student.model, directory, longest=longest, model=model, gpu=gpu
        )
    assert model is not None
    vocabulary = vocabulary_of(tokenizer, end_tokens(model), width=head_width(model))
    on_gpu = device.type == "cuda"  # by CUDA graphs: without, a small model waits for the launches of its kernels
    return Sampler(model, vocabulary.to(device), Sampling.of(spec.rollout), decoder=Decoder if on_gpu else None)
