"""The loss's settings, named as in the method's public configuration."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from xtoken_core.config.base import NONE, ConfigModel, OrNone, teacher_name

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]

LossMode = Literal["p_kl", "gold", "h_kl", "uld", "alm", "chain", "custom"]
"""The losses between different tokenizers, by short name."""
ChainPart = Literal["conditioning", "end_terms", "bare_space"]
MODE_NAMES: dict[str, str] = {"p_kl": "P-KL", "h_kl": "H-KL", "uld": "ULD", "alm": "ALM", "custom": "custom loss"}
"""Names of modes in text, where they differ from the short one."""

DENSE_ONLY: frozenset[LossMode] = frozenset({"gold", "h_kl"})
"""Modes that read a projection row by row: a sparse file has no rows of weights."""
COLUMN_SELECTING_MODES: frozenset[LossMode] = frozenset({"p_kl"})
"""Modes that compare only the `vocab_topk` largest columns: with hidden states the teacher sends column maxima."""
EXACT_FILTERING_MODES: frozenset[LossMode] = frozenset({"p_kl", "custom"})
"""Modes that `exact_token_match_only` applies to, in the loss and in its denominator."""
WHOLE_CHUNK_MODES: frozenset[LossMode] = frozenset({"chain"})
"""Modes that compare only correct chunks whose tokens are all predicted, in the loss and in its denominator."""
TOPK_MODES: frozenset[LossMode] = frozenset({"p_kl", "alm", "chain"})
"""Modes that compare with a teacher given by its largest logits."""
PairKind = Literal["projection", "chain"]
"""Contents of a file about two tokenizers."""
PAIR_NAMES: dict[PairKind, str] = {"projection": "projection", "chain": "chain tables"}
PAIR_KINDS: dict[LossMode, PairKind] = {
    "p_kl": "projection",
    "gold": "projection",
    "h_kl": "projection",
    "chain": "chain",
}
"""The file about two tokenizers that a mode reads."""
FLAGS = ("gold_loss", "xtoken_loss", "uld_loss", "alm_loss")
FLAGS_OF_MODE: dict[LossMode, frozenset[str]] = {
    "p_kl": frozenset(),
    "gold": frozenset({"gold_loss"}),
    "h_kl": frozenset({"gold_loss", "xtoken_loss"}),
    "uld": frozenset({"uld_loss"}),
    "alm": frozenset({"alm_loss"}),
    "custom": frozenset(),
}
"""The flags of the method's public configuration that select a mode."""
PUBLIC_NAMES = (
    *FLAGS,
    "vocab_topk",
    "uncommon_topk",
    "exact_token_match_only",
    "reverse_kl",
    "teacher_chunk_average",
    "gradient_in_place",
)
"""Settings of the method's public configuration, and those that only P-KL reads: with one of them and without a mode
the file means that method."""
PUBLIC_CE_LOSS_SCALE = 0.1
"""Weight of the cross-entropy that is not set, as published, for every mode but chain."""
ADAPTIVE = "adaptive"
"""`kl_loss_weight_end` that is not set, for chain beside a cross-entropy."""
MARGIN, MARGIN_PART = 0.1, 0.25
"""Bits per byte by which a student is better than its teacher once an adaptive weight is 0, or that part of the
teacher's, where it is less: a teacher's answers have hundredths of a bit."""
LEAST_BYTES = 64 << 10
"""Bytes of held-out text, or of a window, below which the figure would be noise: an adaptive weight stays as it is."""
IN_PLACE = "gradient_in_place needs a single teacher with another tokenizer: others read the logits"
READ_BY: dict[str, tuple[LossMode, ...]] = {"vocab_topk": ("p_kl",), "uncommon_topk": ("gold", "h_kl")}
"""The modes that read a setting of the method's public configuration; others leave it alone."""
BELONGS_TO: dict[str, LossMode] = {
    "gradient_in_place": "p_kl",
    "exact_token_match_only": "p_kl",
    "teacher_chunk_average": "p_kl",
    "alm_temperature": "alm",
    "beta": "chain",
    "chain_without": "chain",
}
"""The only mode that reads a setting; it is refused beside others."""
GIVEN_TEXT = {
    "reverse_kl": 'reverse_kl with mode = "chain" is biased on given text, whose paths are not drawn from the student: '
    "add [rollout] or unset it",
    "beta": "beta: a generalised JSD has a reverse part, which is biased on given text and exact only on text that the "
    "student generated: add [rollout] or unset it",
    "importance_cap": "importance_cap weighs completions by the age of their weights: add [rollout] or unset it",
}
"""Why a setting is refused in a run that has no generated text."""


class LossConfig(ConfigModel):
    """The loss between student and teacher, and the weights of its terms.

    `gold_loss`, `xtoken_loss`, `uld_loss` and `alm_loss`, the flags of the method's public configuration, are accepted
    instead of `mode`. With `vocab_topk`, `uncommon_topk`, `exact_token_match_only`, `reverse_kl`,
    `teacher_chunk_average` or `gradient_in_place` and without a mode it is P-KL. A teacher with the student's own
    tokenizer is compared token by token, whatever the mode.
    """

    mode: LossMode = "chain"
    """`p_kl`: the student's distribution, projected onto the teacher's vocabulary, by KL. `gold`: common tokens by KL,
    the others by sorted L1. `h_kl`: gold with near matches among the common tokens. `uld`: all tokens by sorted L1.
    `alm`: the likelihoods of each chunk's own tokens. `chain`: the KL of each chunk by the chain rule, over the pieces
    that each tokenizer itself cuts. `custom`: a class of your own, named on the command line by `--loss module:Class`;
    it may read every setting of this section."""
    temperature: Positive = 1.0
    """Divides both sides' logits; the KD term is multiplied by its square."""
    vocab_topk: OrNone[Annotated[int, Field(ge=1)]] = 8192
    """P-KL, and teachers with the student's tokenizer: number of compared tokens; all of them if "none" or if the
    vocabulary has fewer."""
    uncommon_topk: Annotated[int, Field(ge=1)] = 8192
    """gold, H-KL: length at which the sorted lists of uncommon tokens are cut."""
    reverse_kl: bool = False
    """KL of the student from the teacher instead of the other way round. Chain: of completions only (`[rollout]`);
    given text is compared by the forward KL."""
    beta: OrNone[Annotated[float, Field(gt=0, lt=1)]] = None
    """Chain, completions only (`[rollout]`): generalised JSD, with this weight of the teacher in the mixture. There 0.5
    if left out; "none": the forward KL."""
    exact_token_match_only: bool = False
    """P-KL: leave out chunks that are not correct. A chunk is correct if both sides' tokens cover the same span of the
    source text and each side's tokens spell its own normaliser's output for that span; the two spellings may differ.
    The name is the public method's."""
    teacher_chunk_average: Literal["log_prob", "prob"] = "log_prob"
    """P-KL: average over a chunk's teacher positions, of log-probabilities or of probabilities; `prob` keeps a true
    distribution."""
    alm_temperature: Positive = 1.0
    """ALM: `tau`; the `tau`-th roots of both chunk likelihoods are compared. With 100, as published, the term is a few
    percent of the loss at the default weights."""
    chain_without: tuple[ChainPart, ...] = ()
    """Chain, for measurements: leave out `conditioning`, which compares at the start of a chunk over the tokens that
    can follow the other side's last token only; `end_terms`, whether a token ends after the last token of a chunk; or
    `bare_space`, what follows a single space inside a token, although digits that come later may decide there."""
    importance_cap: Annotated[float, Field(ge=1)] | None = None
    """Completions only (`[rollout]`): weigh a chunk by the ratio of the probabilities that the weights of now and those
    that sampled give to the completion before it, this at most. Left out, stale completions count as they are."""
    kl_loss_weight: NonNegative = 1.0
    """Weight of the KD term."""
    kl_loss_weight_end: OrNone[NonNegative | Literal["adaptive"]] = "adaptive"
    """"adaptive": the KD term has `kl_loss_weight` until the student passes its best teacher on the held-out text,
    or without any on the first pass over the training text; then less in proportion, and 0 once it is ahead by 0.1 bits
    per byte, or a quarter of the teacher's if that is less. A number: the weight at the last step, reached in equal
    parts from the first one; with `rollout.after` that of every step from there on. "none": the weight is the same at
    every step. The default is "none" where no teacher's mode is chain, and with `ce_loss_scale = 0`,
    `dynamic_loss_scaling` or `[rollout]`."""
    ce_loss_scale: NonNegative = 1.0
    """Weight of the cross-entropy. In modes other than chain the default is 0.1, as published."""
    dynamic_loss_scaling: bool = False
    """Scale the KD term to the cross-entropy's size at every micro-batch; replaces both weights above."""
    gradient_in_place: bool = False
    """P-KL from one teacher, Triton kernels: write the gradient into the memory of the student's logits."""

    teacher_aggregation: Literal["sum", "averaged_logits", "select_teacher"] = "sum"
    """Several teachers: add their losses, average their logits, or follow on each micro-batch the one with the lowest
    next-token loss. For the last a run holds all signals of a step at once: its rings have slots for that."""
    teacher_modes: tuple[OrNone[LossMode], ...] = ()
    """`sum`: each teacher's own mode, in the teachers' order; "none" or an empty list: the mode set above."""
    dynamic_teacher_weights: Literal["ce", "entropy", "max_prob"] | None = None
    """`sum`: weigh teachers by a softmax of this score of theirs on the micro-batch, not by static weights."""
    normalize_teacher_by_vocab: bool = False
    """`sum`: weigh a teacher's loss and score by the logarithm of its vocabulary relative to the smallest."""

    @model_validator(mode="before")
    @classmethod
    def _mode_of_flags(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if not (given := [flag for flag in FLAGS if flag in value]):
            named = any(name in value for name in PUBLIC_NAMES)
            return _with_weights({"mode": "p_kl", **value} if named else value)
        is_set = {flag: _flag(flag, value[flag]) for flag in given}
        own = {name: item for name, item in value.items() if name not in FLAGS}
        if "mode" in own:
            _check_flags(own["mode"], is_set)
            return _with_weights(own)
        return _with_weights(own | {"mode": _mode_by_flags({flag for flag in given if is_set[flag]})})

    def mode_of(self, teacher: int) -> LossMode:
        """Return the mode of one teacher, by its number."""
        own = self.teacher_modes[teacher] if teacher < len(self.teacher_modes) else None
        return own or self.mode

    @property
    def weighs_kd(self) -> bool:
        """True if the KD term counts at some step, so that a run needs a teacher."""
        return self.dynamic_loss_scaling or max(self.kl_loss_weight, self.last_kl_loss_weight) > 0

    @property
    def last_kl_loss_weight(self) -> float:
        """Weight of the KD term at the last step, of an adaptive one the largest that it may be."""
        last = self.kl_loss_weight_end
        return last if isinstance(last, (int, float)) else self.kl_loss_weight

    def kl_weight_at(self, step: int, steps: int, behind: float | None = None, *, after: int = 0) -> float:
        """Return the weight of the KD term.

        Args:
            step: Number of the step, from 0; a later one than the last has the last one's weight.
            steps: Optimiser steps of the whole run; the only step of a run has the first weight.
            behind: How far the student is behind its teacher, in margins, for an adaptive weight; None: not known.
            after: Steps of a cold start; the last weight is that of all steps behind it.
        """
        first, last = self.kl_loss_weight, self.last_kl_loss_weight
        if self.kl_loss_weight_end == ADAPTIVE:
            return first if behind is None else first * min(max(1.0 + behind, 0.0), 1.0)
        if after:
            return first if step < after else last
        if steps < 2:
            return first
        done = min(step / (steps - 1), 1.0)
        return (1.0 - done) * first + done * last

    @property
    def modes(self) -> frozenset[LossMode]:
        """Every mode that some teacher may use."""
        return frozenset(own or self.mode for own in self.teacher_modes or (None,))

    def check_given_text(self) -> None:
        """Refuse what is exact on generated text only.

        Raises:
            ValueError: With the reason and what to change.
        """
        if "chain" in self.modes and self.reverse_kl:
            raise ValueError(GIVEN_TEXT["reverse_kl"])
        for name in ("beta", "importance_cap"):
            if getattr(self, name) is not None:
                raise ValueError(GIVEN_TEXT[name])

    def check_weights(self, weights: Sequence[float]) -> None:
        """Refuse what the number of teachers and their static weights make impossible.

        Args:
            weights: Each teacher's static weight.

        Raises:
            ValueError: With the reason and what to change.
        """
        count = len(weights)
        if self.teacher_modes and len(self.teacher_modes) != count:
            raise ValueError(f"teacher_modes names {len(self.teacher_modes)} teachers, the run has {count}")
        if self.gradient_in_place and count > 1:
            raise ValueError(IN_PLACE)
        weightless = self.dynamic_teacher_weights or self.teacher_aggregation == "select_teacher"
        if weightless and any(weight != 1.0 for weight in weights):
            raise ValueError(
                "static teacher weights are not used with dynamic_teacher_weights or select_teacher: unset them"
            )

    def check_teachers(self, weights: Sequence[float], same_tokenizer: Sequence[bool]) -> None:
        """Refuse what these teachers make impossible.

        Args:
            weights: Each teacher's static weight.
            same_tokenizer: True for each teacher with the student's own tokenizer.

        Raises:
            ValueError: With the reason and what to change.
        """
        self.check_weights(weights)
        if self.teacher_aggregation == "averaged_logits" and not all(same_tokenizer):
            raise ValueError(
                'teacher_aggregation = "averaged_logits" adds logits id by id: every teacher must have the '
                'student\'s tokenizer; use "sum"'
            )
        if self.gradient_in_place and any(same_tokenizer):
            raise ValueError(IN_PLACE)
        self._check_modes_are_used(same_tokenizer)
        for teacher, same in enumerate(same_tokenizer):
            own = self.teacher_modes[teacher] if self.teacher_modes else None
            if same and own is not None:
                name = teacher_name(teacher, len(same_tokenizer))
                raise ValueError(
                    f"{name} has the student's tokenizer and is compared token by token: "
                    f'its teacher_modes entry "{own}" must be left out'
                )

    def check_topk(self, topk: Sequence[bool], same_tokenizer: Sequence[bool]) -> None:
        """Refuse what cannot be computed from a teacher's largest logits.

        Args:
            topk: True for each teacher that is given by them.
            same_tokenizer: True for each teacher with the student's own tokenizer.

        Raises:
            ValueError: With the reason and what to change.
        """
        if not any(topk):
            return
        for teacher, (is_topk, same) in enumerate(zip(topk, same_tokenizer, strict=True)):
            mode = self.mode_of(teacher)
            if is_topk and not same and mode not in TOPK_MODES:
                why = "its class reads logits" if mode == "custom" else "it sorts every token's probability"
                name = teacher_name(teacher, len(topk)) if len(topk) > 1 else "the teacher"
                raise ValueError(
                    f'mode = "{mode}" cannot be computed from {name}\'s largest logits, because {why}: set '
                    'teacher.content = "hidden" or "logits", or another mode'
                )
        for name, is_set in {
            'teacher_aggregation = "averaged_logits"': self.teacher_aggregation == "averaged_logits",
            'dynamic_teacher_weights = "entropy"': self.dynamic_teacher_weights == "entropy",
            "gradient_in_place": self.gradient_in_place,
        }.items():
            if is_set:
                raise ValueError(f'{name} reads whole logits, and teacher.content is "topk": unset one of them')

    def _check_modes_are_used(self, same_tokenizer: Sequence[bool]) -> None:
        used = {self.mode_of(teacher) for teacher, same in enumerate(same_tokenizer) if not same}
        why = "every teacher has the student's tokenizer or a mode of its own"
        if self.mode not in {*used, "p_kl", "chain"}:
            raise ValueError(f'mode = "{self.mode}" is used by no teacher: {why}; unset it')
        if unread := self._unread(used):
            raise ValueError(f"{unread}, which compares no teacher: {why}; unset it")

    def _unread(self, modes: Container[LossMode]) -> str | None:
        """Return the beginning of a refusal of a setting that none of these modes reads; None if all are read."""
        for name, mode in BELONGS_TO.items():
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and mode not in modes and "custom" not in modes:  # whose class may read every setting
                return f"{name} belongs to {MODE_NAMES.get(mode, mode)}"
        return None

    @model_validator(mode="after")
    def _refuse_impossible(self) -> LossConfig:
        reason = self._conflict_of_weights() or self._option_without_its_mode() or self._conflict_of_teachers()
        if reason:
            raise ValueError(reason)
        return self

    def _conflict_of_weights(self) -> str | None:
        known = {name: getattr(self, name) for name in ("mode", "teacher_modes", "dynamic_loss_scaling")}
        defaults = _with_weights(known)
        for name in ("kl_loss_weight", "kl_loss_weight_end", "ce_loss_scale"):
            default = defaults.get(name, type(self).model_fields[name].default)
            if self.dynamic_loss_scaling and getattr(self, name) != default:
                return f"{name} is not used with dynamic_loss_scaling, which scales by itself: unset one of them"
        if self.kl_loss_weight_end is not None and self.ce_loss_scale == 0:
            return "kl_loss_weight_end weighs the KD term against the cross-entropy, whose weight is 0: unset it"
        if self.gradient_in_place and not self.weighs_kd:
            return "gradient_in_place belongs to P-KL, whose weight is 0: unset it"
        return None

    def _option_without_its_mode(self) -> str | None:
        if self.reverse_kl and self.beta is not None:
            return "reverse_kl and beta are two forms of the divergence: unset one of them"
        if unread := self._unread(self.modes):
            return f"{unread}, the mode is {self.mode}: unset one of them"
        if self.modes == {"uld"} and self.reverse_kl:
            return 'reverse_kl has no meaning for mode = "uld", which compares sorted probabilities: unset it'
        if self.modes == {"alm"} and self.temperature != 1.0:
            return 'mode = "alm" compares likelihoods at temperature 1: use alm_temperature'
        return None

    def _conflict_of_teachers(self) -> str | None:
        if self.teacher_aggregation != "sum":
            for name in ("teacher_modes", "dynamic_teacher_weights", "normalize_teacher_by_vocab"):
                if getattr(self, name):
                    return f'{name} belongs to teacher_aggregation = "sum", not "{self.teacher_aggregation}"'
        if self.teacher_aggregation == "averaged_logits" and self.mode not in ("p_kl", "chain"):
            return 'teacher_aggregation = "averaged_logits" compares token by token: unset mode'
        return None


def margins_behind(student: float, teacher: float) -> float:
    """Return the bits per byte of a student less its teacher's, in margins: an adaptive weight is 0 at -1.

    Args:
        student: Bits per byte of the student.
        teacher: Its best teacher's on the same text.

    >>> round(margins_behind(0.95, 1.0), 6), round(margins_behind(0.03, 0.04), 6)
    (-0.5, -1.0)
    """
    return (student - teacher) / max(min(MARGIN, MARGIN_PART * teacher), 1e-9)


def _with_weights(value: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the weights that they have by default."""
    is_chain = value.get("mode", "chain") == "chain"
    defaults: dict[str, Any] = {} if is_chain else {"ce_loss_scale": PUBLIC_CE_LOSS_SCALE}
    has_no_end = parsed(float, value.get("ce_loss_scale")) == 0 or parsed(bool, value.get("dynamic_loss_scaling"))
    if "chain" not in modes_of(value, "chain") or has_no_end:
        defaults["kl_loss_weight_end"] = None
    return defaults | value


def modes_of(value: Mapping[str, Any], usual: str) -> list[Any]:
    """Return the modes of settings that are not validated yet, by teacher; `usual` is that of settings without one."""
    mode, own = value.get("mode", usual), value.get("teacher_modes") or (None,)
    return [mode if each in (None, NONE) else each for each in own] if isinstance(own, (list, tuple)) else [mode]


def parsed(kind: type, value: Any) -> Any:
    """Return a value as the model reads it; None if it cannot, which the model reports."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


def _flag(name: str, value: Any) -> bool:
    if (flag := parsed(bool, value)) is None:
        raise ValueError(f"{name} takes true or false")
    return bool(flag)


def _mode_by_flags(flags: set[str]) -> LossMode:
    if flags == {"xtoken_loss"}:
        raise ValueError("xtoken_loss widens the gold loss's common tokens: set gold_loss = true as well")
    for mode, own in FLAGS_OF_MODE.items():
        if flags == own:
            return mode
    raise ValueError("gold_loss, uld_loss and alm_loss exclude each other: set one of them, or mode")


def _check_flags(mode: Any, is_set: dict[str, bool]) -> None:
    own = FLAGS_OF_MODE.get(mode, frozenset())
    for flag, value in is_set.items():
        if value != (flag in own):
            raise ValueError(f'mode = "{mode}" and {flag} = {str(value).lower()} exclude each other: unset {flag}')
