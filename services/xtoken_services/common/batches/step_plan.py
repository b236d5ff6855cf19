"""Plan and denominators of a step, computed alike by teacher and trainer from metadata alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xtoken_core import schema
from xtoken_core.config.loss import COLUMN_SELECTING_MODES
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import PAD_MULTIPLE, padded_length
from xtoken_core.data_plane.run_client import StepRows
from xtoken_core.plan import Plan, RowLengths, plan
from xtoken_core.transports.ring import TOPK_DTYPE, RingShape, TopKSettings
from xtoken_core.wire import Column


@dataclass(frozen=True)
class GeneratedRows:
    """The completions of a step.

    Attributes:
        count: Number of them.
        tokens: Their tokens, without the prompts'.
        finished: Those that ended by themselves.
        staleness: Sum over them of the steps since the weights that generated them.
        stalest: The largest of these.
        entropy: Sum of the entropies of the student's distributions along them, in nats.
        answered: Those whose record has an answer.
        right: Those of them that give it.
        seconds: Time in which they were generated, summed over rollout workers.
        waited: Time for which the workers waited for prompts or weights before, in seconds.
    """

    count: int = 0
    tokens: int = 0
    finished: int = 0
    staleness: int = 0
    stalest: int = 0
    entropy: float = 0.0
    answered: int = 0
    right: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the columns of `steps.jsonl`; none without completions."""
        if not self.count:
            return {}
        metrics = {
            "completions": self.count,
            "completion_tokens": round(self.tokens / self.count, 3),
            "finished": round(self.finished / self.count, 6),
            "staleness": round(self.staleness / self.count, 6),
        }
        if self.entropy:  # servers do not give it
            metrics["entropy"] = round(self.entropy / max(self.tokens, 1), 6)
        if self.answered:
            metrics["completion_accuracy"] = round(self.right / self.answered, 6)
        if self.seconds:
            metrics["generated_tokens_per_second"] = round(self.tokens / self.seconds, 3)
            metrics["rollout_wait"] = round(self.waited / (self.waited + self.seconds), 6)
        return metrics


@dataclass(frozen=True)
class StepPlan:
    """Plan of a step: micro-batches, denominators, samples.

    Attributes:
        step: Its number, from 0.
        plan: The micro-batches of every rank.
        ids: Positions to train: with a row, and not dead.
        skipped: Positions without a row.
        dead: Dead positions; one with a row stays in the plan, masked.
        ce_tokens: Next-token predictions of the step: the denominator of the cross-entropy.
        kd_chunks: Valid chunks of the step per teacher: the denominator of its KD term (next-token predictions for a
            teacher with the student's tokenizer). With averaged logits, which have one term, those of all samples.
        samples_of: Samples that each teacher compares; empty without routes.
        tokens_of: Tokens to learn of these, and last those of all samples; empty without routes.
        text_of: The same of text alone, as `ce_tokens` counts it, without those of all samples.
        tokens: Student tokens of the step, without padding.
        truncated: Truncated documents of the step.
        padding: Fraction of this node group's computed positions, of all sides, that are no token.
        generated: The step's completions.
    """

    step: int
    plan: Plan
    ids: tuple[int, ...]
    skipped: tuple[int, ...]
    dead: tuple[int, ...]
    ce_tokens: int
    kd_chunks: tuple[int, ...]
    tokens: int
    truncated: int
    padding: float = 0.0
    generated: GeneratedRows = GeneratedRows()
    samples_of: tuple[int, ...] = ()
    tokens_of: tuple[int, ...] = ()
    text_of: tuple[int, ...] = ()

    @property
    def shares(self) -> list[float] | None:
        """Per teacher its samples' part of the tokens to learn; None without routes.

        Each teacher's term is a mean over its own samples: weighed by these, the terms are one mean over all samples,
        as one teacher's would be.
        """
        return [own / max(self.tokens_of[-1], 1) for own in self.tokens_of[:-1]] if self.tokens_of else None


def length_fields(run: ResolvedRun) -> list[str]:
    """Return the names of the columns with each side's lengths: the student's, then each teacher's."""
    own = schema.INPUT_LENGTHS.name
    others = [
        own if same else schema.field_name(schema.TEACHER_INPUT_LENGTHS, teacher)
        for teacher, same in enumerate(run.same_tokenizer)
    ]
    return [own, *others]


def count_fields(run: ResolvedRun) -> list[str]:
    """Return the name of the column with each row's part of a teacher's denominator, per teacher."""
    return [
        schema.CE_TOKENS.name if same else schema.field_name(schema.KD_CHUNKS, teacher)
        for teacher, same in enumerate(run.same_tokenizer)
    ]


def plan_fields(run: ResolvedRun) -> list[str]:
    """Return the names of the columns that `plan_step` reads."""
    own = [schema.CE_TOKENS.name, schema.TRUNCATED.name, *([schema.TEACHERS.name] if run.routes else [])]
    if run.spec.rollout is not None:
        own += [field.name for field in schema.ROLLOUT_FIELDS]
    return list(dict.fromkeys([*length_fields(run), *count_fields(run), *own]))


def plan_step(run: ResolvedRun, step: int, rows: StepRows) -> StepPlan:
    """Return the plan of a step; the same rows give every process the same plan."""
    spec = run.spec
    columns = {name: _integers(column) for name, column in rows.columns.items()}
    lengths = [columns.get(name, []) for name in length_fields(run)]
    routes = [schema.teachers_of(bits, len(spec.teacher)) for bits in columns.get(schema.TEACHERS.name, ())]
    table = []
    for row, i in enumerate(rows.ids):
        student, *others = (side[row] for side in lengths)
        if not routes:
            table.append(RowLengths(i, (student, *others)))
            continue
        # A teacher with the student's tokenizer has the student's lengths, also of samples that it does not compare.
        own = (n if teacher in routes[row] else 0 for teacher, n in enumerate(others))
        table.append(RowLengths(i, (student, *own), routes[row]))
    dead = set(rows.dead)
    # Dead rows stay in the plan, masked, so that it is the same on sides that learn of them at different times; only
    # counts leave them out.
    alive = [row for row, i in enumerate(rows.ids) if i not in dead]

    def total(name: str, of: Sequence[int] = alive) -> int:
        return sum(columns[name][row] for row in of) if rows.ids else 0

    compared = [[row for row in alive if not routes or n in routes[row]] for n in range(len(spec.teacher))]

    def trained(of: Sequence[int]) -> int:
        return total(schema.CE_TOKENS.name, of) + (total(schema.COMPLETION_TOKENS.name, of) if spec.rollout else 0)

    made = plan(
        table,
        ranks=spec.workers.ranks,
        token_budget=spec.train.micro_batch_tokens,
        pad_multiple=PAD_MULTIPLE,
        max_widths=max_widths(run),
        packed=run.packed,
    )
    return StepPlan(
        step=step,
        plan=made,
        ids=tuple(rows.ids[row] for row in alive),
        skipped=tuple(i for i in rows.skipped if i not in dead),
        dead=tuple(rows.dead),
        ce_tokens=total(schema.CE_TOKENS.name),
        kd_chunks=tuple(map(total, count_fields(run), compared)),
        tokens=total(schema.INPUT_LENGTHS.name),
        truncated=total(schema.TRUNCATED.name),
        padding=1.0 - sum(sum(row.lengths) for row in table) / max(made.padded_tokens, 1) if table else 0.0,
        generated=_generated(step, columns, alive) if run.spec.rollout is not None and rows.ids else GeneratedRows(),
        samples_of=tuple(map(len, compared)) if run.routes else (),
        tokens_of=tuple(map(trained, [*compared, alive])) if run.routes else (),
        text_of=tuple(total(schema.CE_TOKENS.name, of) for of in compared) if run.routes else (),
    )


def _generated(step: int, columns: Mapping[str, Sequence[int]], alive: Sequence[int]) -> GeneratedRows:
    """Sum up the living completions of a step."""
    versions = columns[schema.WEIGHTS_VERSION.name]
    rows = [row for row in alive if versions[row] >= 0]
    ages = [step - versions[row] for row in rows]

    def total(field: schema.Field) -> int:
        return sum(columns[field.name][row] for row in rows)

    return GeneratedRows(
        count=len(rows),
        tokens=total(schema.COMPLETION_TOKENS),
        finished=total(schema.FINISHED),
        staleness=sum(ages),
        stalest=max(ages, default=0),
        entropy=total(schema.ENTROPY) / 1e3,
        answered=sum(columns[schema.RIGHT.name][row] >= 0 for row in rows),
        right=sum(columns[schema.RIGHT.name][row] > 0 for row in rows),
        seconds=total(schema.GENERATION_TIME) / 1e6,
        waited=total(schema.WAITING_TIME) / 1e6,
    )


def max_widths(run: ResolvedRun) -> tuple[int, ...]:
    """Return the widest padded row of each side."""
    return tuple(padded_length(m.context_length) for m in (run.spec.student, *run.spec.teacher))


def ring_shape(run: ResolvedRun, teacher: int) -> RingShape:
    """Return the shape of a teacher's ring. Writer and reader compute it from the run, never from a message."""
    spec, model = run.spec, run.teachers[teacher]
    content = spec.content_of(teacher)
    hidden = model.hidden_size if content == "hidden" else 0
    # Maxima are not stored: a trainer computes those of a stored teacher from its head.
    maxima = hidden and selects_columns(run, teacher) and spec.teacher[teacher].store is None
    # Rows are at least a multiple wide, so no micro-batch has more of them.
    rows = 1 if run.packed else min(spec.train.samples_per_step, spec.train.micro_batch_tokens // PAD_MULTIPLE)
    return RingShape(
        slots=spec.ring_slots,
        slot_tokens=spec.train.micro_batch_tokens,
        head_width=model.head_width,
        vocab=model.vocab_size,
        dtype=TOPK_DTYPE if content == "topk" else spec.teacher[teacher].dtype,
        hidden=hidden,
        topk=min(spec.teacher[teacher].topk, model.vocab_size) if content == "topk" else 0,
        max_rows=rows if maxima else 0,
        packed=run.packed,
    )


def topk_settings(run: ResolvedRun, teacher: int) -> TopKSettings:
    """Return the settings of a teacher that sends its largest logits: number, vocabulary, temperature."""
    shape = ring_shape(run, teacher)
    return TopKSettings(shape.topk, shape.vocab, run.spec.loss.temperature)


def selects_columns(run: ResolvedRun, teacher: int) -> bool:
    """Return whether the loss compares only the columns with a teacher's largest logits, and so needs the maxima."""
    spec = run.spec
    if spec.loss.vocab_topk is None or spec.loss.vocab_topk >= run.teachers[teacher].vocab_size:
        return False
    return run.same_tokenizer[teacher] or spec.loss.mode_of(teacher) in COLUMN_SELECTING_MODES


def _integers(column: Column) -> Sequence[int]:
    return column.values.cast("q" if column.dtype == "int64" else "?").tolist()
