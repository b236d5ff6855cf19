"""The compared methods and conditions, and the cells that they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.real import instructions, orders, word_problems
from experiments.real.orders import ORDERS
from experiments.real.questions import HELD_OUT
from experiments.real.word_problems import PROBLEMS

SMOLLM2, GEMMA3, QWEN15 = "smollm2-135m-instruct", "gemma3-270m", "qwen2.5-coder-1.5b-instruct"
QWEN05 = "qwen2.5-coder-0.5b-instruct"
"""A student with its teacher's tokenizer, QWEN15's."""
CHAT = "chat-en"
QUESTIONS = {PROBLEMS.source: PROBLEMS, word_problems.ALONE: PROBLEMS, ORDERS.source: ORDERS}
"""The questions of a text, by its name."""
ANSWERED = (*QUESTIONS, instructions.SOURCE)
"""Texts that a teacher writes as answers."""
TASKS = ("next-word-de", "sums")


WEIGHTS = {"ce": (0.0, 1.0), "even": (1.0, 1.0), "kd": (1.0, 0.1), "strong": (3.0, 1.0), "light": (0.3, 1.0)}
"""Weights of the KD term and of the cross-entropy."""


MICRO_BATCH_TOKENS = 4608
"""Of a teacher's logits at 262,144 tokens, 2.4 GB a slot in bfloat16: several runs fit one GPU."""
HALF_STEP_TOKENS = 6912
"""Two micro-batches of German a step instead of three, where a teacher sends hidden states."""
WHOLE_STEP_TOKENS = 13_312
"""One micro-batch of German a step (11,800 tokens, 99% of the steps below this), without a teacher."""


def _named(*names: str) -> dict[str, tuple[float, float]]:
    return {name: WEIGHTS[name] for name in names}


@dataclass(frozen=True)
class Method:
    """A way to train the student.

    Attributes:
        title: Name in tables.
        loss: Its `[loss]` table beside the weights.
        weights: Pairs of `kl_loss_weight` and `ce_loss_scale` that are tried, by name.
        projects: Takes a projection file.
        custom: `MODULE:CLASS` of a loss outside the product; empty for a mode of the product.
        teachers: How often the teacher is listed: once for each of `teacher_modes`; 0 trains without it.
        micro_batch_tokens: `train.micro_batch_tokens`: with fewer micro-batches a step takes less time and more memory.
            The loss is the same but for rounding, since it divides by a step's counts; P-KL chooses its columns
            micro-batch by micro-batch, so that its number belongs to the method.
        hidden: Teachers send hidden states, which the student's process multiplies out to the same logits: a ring of
            megabytes instead of gigabytes. Not for P-KL, which then multiplies out its columns only.
        on_policy: The student completes the text's prompts and learns from the divergence on its completions.
        after: Part of the steps that learn from the text first, by cross-entropy at `FIRST_RATE`.
        shots: The teacher of questions reads solved ones before each, as when it wrote the answers.
        teacher_temperature: The teacher's on completions; the result file's runs had it on text beside them, too.
        temperature: At which completions are drawn.
        top_k: Among how many likeliest tokens they are drawn; None: all.
        fraction: Part of a step that is completions.
        second: The teacher of a condition's second text compares, too, or alone with `teachers` = 0.
        routed: Each of the two compares its own text.
        second_weight: Weight of the second text's teacher beside the other.
    """

    title: str
    loss: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, tuple[float, float]] = field(default_factory=lambda: _named("even", "kd", "strong"))
    projects: bool = False
    custom: str = ""
    teachers: int = 1
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    hidden: bool = False
    on_policy: bool = False
    after: float = 0.0
    shots: bool = False
    teacher_temperature: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    fraction: float = 1.0
    second: bool = False
    routed: bool = False
    second_weight: float = 1.0

    def micro_batch_of(self, condition: Condition) -> int:
        """Return the tokens of a micro-batch; the usual ones with Gemma's vocabulary and with two texts."""
        usual = condition.student == GEMMA3 or condition.second
        return MICRO_BATCH_TOKENS if usual else self.micro_batch_tokens

    @property
    def first_weight(self) -> str:
        """The weights that are tried at every learning rate; the others are at the rate that was best with these."""
        return next(iter(self.weights))

    @property
    def reads_tables(self) -> bool:
        """True if the loss, or that of one teacher, reads chain tables."""
        return "chain" in (self.loss.get("mode"), *self.loss.get("teacher_modes", ()))


CHAIN = {"mode": "chain", "chain_without": ["bare_space"], "kl_loss_weight_end": "none"}
"""Without the nodes at a single space and with one weight to the end, as these runs were planned: no defaults."""

_LIGHT = _named("even", "light", "strong")
"""For losses that lost to cross-entropy, or hardly gained, with `even`: less of the KD term, not less of the other."""


def _alm(title: str, temperature: float) -> Method:
    settings = {"mode": "alm", "alm_temperature": temperature}
    return Method(title, settings, projects=True, micro_batch_tokens=HALF_STEP_TOKENS, hidden=True)


def _chain(title: str, **settings: Any) -> Method:
    return Method(title, CHAIN | settings, micro_batch_tokens=HALF_STEP_TOKENS, hidden=True)


def _on_policy(title: str, **settings: Any) -> Method:
    return replace(_chain(title, **settings), weights=_named("even"), on_policy=True, shots=True)


def _custom(title: str, name: str) -> Method:
    return Method(title, {"mode": "custom"}, _LIGHT, custom=f"experiments.losses.{name}", hidden=True)


METHODS = {
    "ce": Method("cross-entropy only", weights={"ce": (0.0, 1.0)}, teachers=0, micro_batch_tokens=WHOLE_STEP_TOKENS),
    "p_kl": Method("P-KL", {"mode": "p_kl"}, projects=True),
    "p_kl_scaled": Method(
        "P-KL, `dynamic_loss_scaling`", {"mode": "p_kl", "dynamic_loss_scaling": True}, _named("even"), projects=True
    ),
    "gold": Method("gold", {"mode": "gold"}, _LIGHT, projects=True, micro_batch_tokens=HALF_STEP_TOKENS, hidden=True),
    "uld": Method("ULD", {"mode": "uld"}, _LIGHT, projects=True, hidden=True),
    "alm1": _alm("ALM, tau 1", 1.0),
    "alm100": _alm("ALM, tau 100", 100.0),
    "chain": _chain("chain, one weight to the end"),
    "chain_fading": _chain("chain, fading", kl_loss_weight_end=0.0),
    "chain_adaptive": _chain("chain, adaptive (default)", kl_loss_weight_end="adaptive"),
    "chain_shots": replace(_chain("chain, one weight to the end, teacher reads solved problems"), shots=True),
    "chain_adaptive_shots": replace(
        _chain("chain, adaptive (default), teacher reads solved problems", kl_loss_weight_end="adaptive"), shots=True
    ),
    "on_forward": _on_policy("completions, forward KL", beta="none"),
    "on_reverse": _on_policy("completions, reverse KL", reverse_kl=True),
    "on_jsd": _on_policy("completions, JSD", beta=0.5),
    "on_after": replace(
        _on_policy("cross-entropy, then completions, JSD", beta=0.5, kl_loss_weight_end=1.0),
        weights=_named("ce"),
        after=0.3,
    ),
    "on_reverse_bare": replace(
        _on_policy("completions, reverse KL, teacher reads the question alone", reverse_kl=True), shots=False
    ),
    "on_jsd_bare": replace(_on_policy("completions, JSD, teacher reads the question alone", beta=0.5), shots=False),
    "adaptive_level": _chain("chain, adaptive, 0 once level (dropped)", kl_loss_weight_end="adaptive"),
    "adaptive_past": _chain("chain, adaptive, 0 at .05 ahead (dropped)", kl_loss_weight_end="adaptive"),
    "chain_alm1": Method(
        "chain and ALM, tau 1",
        CHAIN | {"teacher_modes": ["chain", "alm"], "alm_temperature": 1.0},
        projects=True,
        teachers=2,
        hidden=True,
    ),
    "chain_second": replace(_chain("chain, one weight to the end, the second text's teacher"), teachers=0, second=True),
    "chain_both": replace(_chain("chain, one weight to the end, both teachers on everything"), second=True),
    "chain_routed": replace(
        _chain("chain, one weight to the end, each teacher on its own text"), second=True, routed=True
    ),
    "chain_routed_twice": replace(
        _chain("chain, one weight to the end, each teacher on its own text, the second with weight 2"),
        second=True,
        routed=True,
        second_weight=2.0,
    ),
    "chain_bare_space": _chain("chain with the bare space", chain_without=[]),
    "chain_unconditioned": _chain("chain, not conditioned", chain_without=["bare_space", "conditioning"]),
    "chain_no_end": _chain("chain without end terms", chain_without=["bare_space", "end_terms"]),
    "chain_uncorrected": _chain("chain without corrections", chain_without=["conditioning", "end_terms"]),
    "bpm": _custom("BPM", "bpm:BPMLoss"),
    "escd": _custom("ESCD", "escd:ESCDLoss"),
    "simct": _custom("SimCT", "simct:SimCTLoss"),
    "x_token_v6": _custom("X-Token v6", "x_token_v6:XTokenV6Loss"),
    "gold_bayesian": _custom("GOLD, bayesian merge", "gold_bayesian:GoldBayesianLoss"),
    "strict_top": _custom("strict 1:1, top 16", "strict_top:StrictTopLoss"),
    "same": Method("teacher with the student's tokenizer"),
    "kd_same": Method("KD, one tokenizer, adaptive", {"vocab_topk": "none"}, _named("even"), hidden=True),
    "samples": Method("cross-entropy, teacher's samples", weights={"ce": (0.0, 1.0)}, teachers=0),
}
METHODS |= {
    f"{name}_sharp": replace(METHODS[name], title=f"{METHODS[name].title}, teacher at .5", teacher_temperature=0.5)
    for name in ("on_jsd", "on_after", "on_jsd_bare")
}
_SHARP = METHODS["on_jsd_sharp"]
METHODS |= {
    name: replace(_SHARP, title=f"{_SHARP.title}, drawn at {drawn:g} of 20", temperature=drawn, top_k=20)
    for name, drawn in (("on_jsd_warm", 1.5), ("on_jsd_hot", 2.0))
}
METHODS["on_half_sharp"] = replace(_SHARP, title=f"half text, half {_SHARP.title}", fraction=0.5)


DROPPED_FORMS = ("adaptive_level", "adaptive_past")
DROPPED = (*DROPPED_FORMS, "same", "samples")
"""What result files have and this module no longer makes: forms of the adaptive weight, `clip(behind / .05)` and
`clip(1 + behind / .05)`, and controls that can be made at commit 6263ed3f, as the text of `CHAT` and `TASKS`."""
TITLES = {name: method.title for name, method in METHODS.items()}

RATES = (1e-4, 2e-4, 4e-4)
"""Swept where all methods are compared. Of 5e-5, 1e-4 and 2e-4, tried first, the largest was best for every method."""
ONE_RATE = (2e-4,)
WIDE_RATES = (5e-5, *RATES, 8e-4, 1.6e-3)
OTHER_RATES = (1e-4, 4e-4)
"""For cross-entropy and the default, beside the one rate that all methods have on a text."""
FIRST_RATE = 2e-4
"""Of the steps of `on_after` that learn from text."""
SMALL_RATES = (2e-5, 5e-5)
"""For Gemma as the student: 2e-4, tried first, was too large for cross-entropy."""
TASK_TOKENS = 8
"""Tokens of a completion, where a condition states no other number."""
STUDENT_CONTEXT, TEACHER_CONTEXT = 768, 512


@dataclass(frozen=True)
class Condition:
    """Models and text that a method is tried on.

    Attributes:
        student: Directory of the student below `models`.
        teacher: Directory of the teacher.
        source: Text that is trained and held out: `handbook-de`, `python-code`, ...
        size: Bytes of text that are trained, chosen by the data seed.
        others: Sources whose test split is measured too: another source of the language, other languages.
        steps: Optimiser steps.
        rates: Learning rates of every method.
        tasks: Tasks whose accuracy is measured at every evaluation, by their files below `texts`.
        note: Tells the condition in tables from one with the same text and models.
        evaluations: Evaluations of a run after the one before its first step.
        contexts: Most tokens of the student's and of the teacher's rows.
        documents: Documents a step.
        task_tokens: Tokens of a task's completion.
        task_prompts: Prompts of a task.
        ends: What ends an answer is learnt (`data.append_eos`).
        start: Condition whose run with cross-entropy on the same data seed gives the student; empty: as fetched.
        second: Another text, of which twice as many documents are trained: they are shorter.
        second_teacher: Condition whose run with cross-entropy on the first data seed is that text's teacher.
        compiles: Models are compiled, which few steps do not pay for.
        follows: Students are asked for the held-out instructions before their first step and after their last one.
        completion_tokens: Most tokens of a completion that is trained on.
    """

    student: str
    teacher: str
    source: str
    size: int
    others: tuple[str, ...]
    steps: int = 150
    rates: tuple[float, ...] = ONE_RATE
    tasks: tuple[str, ...] = ()
    note: str = ""
    evaluations: int = 6
    contexts: tuple[int, int] = (STUDENT_CONTEXT, TEACHER_CONTEXT)
    documents: int = 24
    task_tokens: int = TASK_TOKENS
    task_prompts: int = 200
    ends: bool = True
    start: str = ""
    second: str = ""
    second_teacher: str = ""
    compiles: bool = True
    follows: bool = False
    completion_tokens: int = word_problems.ANSWER_TOKENS

    @property
    def task(self) -> str:
        """The task whose accuracy counts."""
        return instructions.TASK if self.follows else self.tasks[0]


_GERMAN = ("manual-de", "handbook-en", "handbook-fr")
COLD_START, START_RATE = "qwen-problems-cold", 4e-4
NO_END = "-no-end"
"""Ends the names of conditions in which the end of an answer is not learnt."""
CONDITIONS = {
    "de-500k": Condition(SMOLLM2, GEMMA3, "handbook-de", 500_000, _GERMAN, rates=RATES),
    "de-100k": Condition(SMOLLM2, GEMMA3, "handbook-de", 100_000, _GERMAN),
    "de-2m": Condition(SMOLLM2, GEMMA3, "manual-de", 2_000_000, ("handbook-de", "handbook-en", "handbook-fr"), 300),
    "de-6m": Condition(SMOLLM2, GEMMA3, "manual-de", 6_000_000, ("handbook-de", "handbook-en", "handbook-fr"), 600),
    "fr-500k": Condition(SMOLLM2, GEMMA3, "handbook-fr", 500_000, ("manual-fr", "handbook-en", "handbook-de")),
    "code-2m": Condition(SMOLLM2, GEMMA3, "python-code", 2_000_000, ("handbook-en", "handbook-de"), 300),
    "chat-500k": Condition(GEMMA3, SMOLLM2, CHAT, 500_000, ("handbook-en", "handbook-de")),
    "chat-500k-small-rates": Condition(
        GEMMA3, SMOLLM2, CHAT, 500_000, ("handbook-en", "handbook-de"), rates=SMALL_RATES, note="smaller rates"
    ),
    "de-500k-tasks": Condition(SMOLLM2, GEMMA3, "handbook-de", 500_000, _GERMAN, tasks=TASKS),
}
SWEEPS = {f"{name}-rates": name for name in ("de-100k", "de-2m", "fr-500k", "code-2m")}
"""Conditions that try other learning rates on a text, and the one that has the rest of its runs."""
CONDITIONS |= {
    sweep: replace(CONDITIONS[name], rates=OTHER_RATES, note="other rates") for sweep, name in SWEEPS.items()
}
TEACHERS = {"qwen": QWEN15, "gemma": GEMMA3}
"""SmolLM2's teachers, by how a condition's name begins: one is far better than the trained student, one worse."""
_FINE = {"de-500k": 15, "fr-500k": 15, "de-2m": 20, "de-6m": 20}
"""Evaluations of the texts on which both teach: as many as an adaptive weight and the best step need."""
_TEXTS = {text: replace(CONDITIONS[text], evaluations=number) for text, number in _FINE.items()} | {
    "python-32m": Condition(
        SMOLLM2, GEMMA3, "python-packages", 32_000_000, (), 320, evaluations=16, contexts=(1024, 1024), documents=32
    )
}
CONDITIONS |= {
    f"{pair}-{name}": replace(text, teacher=teacher, others=("handbook-en",), rates=WIDE_RATES, note=pair)
    for pair, teacher in TEACHERS.items()
    for name, text in _TEXTS.items()
}

_QWEN_GERMAN = CONDITIONS["qwen-de-500k"]
CONDITIONS |= {
    "qwen-de-500k-to-gemma": replace(
        _QWEN_GERMAN, student=GEMMA3, rates=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4), note="to Gemma 3 270M"
    ),
    "qwen-de-500k-to-qwen": replace(
        _QWEN_GERMAN, student=QWEN05, rates=(5e-5, 1e-4), contexts=(512, 512), note="to Qwen 0.5B, one tokenizer"
    ),
    "qwen-problems": Condition(
        SMOLLM2, QWEN15, PROBLEMS.source, 10_000_000, ("handbook-en",), 240, rates=(1e-4, 2e-4, 4e-4, 8e-4),
        tasks=(PROBLEMS.task,), note="the teacher's answers", evaluations=4, contexts=(512, 512), documents=32,
        task_tokens=word_problems.ANSWER_TOKENS, task_prompts=HELD_OUT,
    ),
}  # fmt: skip
_PROBLEMS = CONDITIONS["qwen-problems"]
_COLD = replace(_PROBLEMS, steps=480, rates=(START_RATE,), note="the teacher's answers, three times")
CONDITIONS |= {
    f"qwen-problems{NO_END}": replace(_PROBLEMS, ends=False, note=f"{_PROBLEMS.note}, their end not learnt"),
    COLD_START: replace(_COLD, evaluations=3),
    f"{COLD_START}{NO_END}": replace(_COLD, ends=False, evaluations=6, note=f"{_COLD.note}, their end not learnt"),
    "qwen-problems-on": replace(
        _PROBLEMS, steps=150, evaluations=2, rates=(1e-5, 3e-5, 1e-4), start=COLD_START,
        note="after a cold start",
    ),
}  # fmt: skip
START, INSTRUCTIONS, FEW, FOR_GEMMA = (
    "qwen-problems-start", "qwen-instructions", "qwen-instructions-few", "qwen-instructions-to-gemma"
)  # fmt: skip
CONDITIONS |= {
    START: replace(
        _PROBLEMS, others=(), rates=(2e-4,), note="before instructions", evaluations=1, compiles=False, follows=True
    ),
    INSTRUCTIONS: Condition(
        SMOLLM2, QWEN15, instructions.SOURCE, 10_000_000, (), 150, rates=(3e-5, 5e-5, 1e-4, 2e-4),
        tasks=(PROBLEMS.task,), note=f"after word problems, {instructions.TRAINED:,} prompts", evaluations=3,
        contexts=(512, 512), documents=32, task_tokens=word_problems.ANSWER_TOKENS, task_prompts=300, start=START,
        compiles=False, follows=True, completion_tokens=instructions.ANSWER_TOKENS,
    ),
}  # fmt: skip
_INSTRUCTIONS = CONDITIONS[INSTRUCTIONS]
CONDITIONS |= {
    FEW: replace(_INSTRUCTIONS, size=150_000, note="after word problems, few prompts"),
    FOR_GEMMA: replace(_INSTRUCTIONS, student=GEMMA3, start="", tasks=(), note="to Gemma 3 270M"),
}
AGAIN, FEW_COLD, FEW_ON = "qwen-problems-on-again", "qwen-problems-few-cold", "qwen-problems-few-on"
PART_COLD, PART_ON, PART_LONG = "qwen-problems-part-cold", "qwen-problems-part-on", "qwen-problems-part-long"
CONDITIONS[AGAIN] = replace(CONDITIONS["qwen-problems-on"], rates=(3e-5,), note="after another cold start")
CONDITIONS |= {
    FEW_COLD: replace(_COLD, size=200_000, steps=240, evaluations=4, note="a tenth of the answers"),
    FEW_ON: replace(
        CONDITIONS[AGAIN], size=200_000, rates=(3e-5, 1e-4), start=FEW_COLD, note="a tenth of the problems"
    ),
    PART_COLD: replace(_COLD, size=500_000, evaluations=4, note="a quarter of the answers"),
    PART_ON: replace(
        CONDITIONS[AGAIN],
        size=500_000,
        steps=200,
        rates=(3e-5, *RATES),
        start=PART_COLD,
        note="a quarter of the problems",
    ),
}
MID_COLD, MID_ON, MID_LONG = "qwen-problems-mid-cold", "qwen-problems-mid-on", "qwen-problems-mid-long"
CONDITIONS |= {
    PART_LONG: replace(CONDITIONS[PART_ON], steps=400, evaluations=4, note="a quarter, 400 steps"),
    MID_COLD: replace(CONDITIONS[PART_COLD], size=360_000, note="18% of the answers"),
    MID_ON: replace(CONDITIONS[PART_ON], size=360_000, start=MID_COLD, note="18% of the problems"),
}
CONDITIONS[MID_LONG] = replace(CONDITIONS[MID_ON], steps=400, evaluations=2, note="18%, 400 steps")
ALONE_COLD, ALONE_ON = "qwen-problems-alone-cold", "qwen-problems-alone-on"
_ALONE: dict[str, Any] = {"source": word_problems.ALONE, "size": 700_000}
_ALONE |= dict.fromkeys(("task_tokens", "completion_tokens"), word_problems.LONGER)
CONDITIONS |= {
    ALONE_COLD: replace(CONDITIONS[PART_COLD], **_ALONE, note="a quarter of the answers of a teacher asked alone"),
    ALONE_ON: replace(
        CONDITIONS[PART_ON], **_ALONE, start=ALONE_COLD, note="a quarter, the teacher always asked the question alone"
    ),
}
ORDER_SIZES = {"qwen-orders-least": 40_000, "qwen-orders-few": 100_000, "qwen-orders-more": 250_000}
"""Bytes of orders. The least of which the cold start answers half of the requests right on the first data seed is
continued, or else the last: written before any run."""
_ORDERS: dict[str, Any] = {"source": ORDERS.source, "tasks": (ORDERS.task,)}
_ORDERS |= dict.fromkeys(("task_tokens", "completion_tokens"), orders.ANSWER_TOKENS)
CONDITIONS |= {
    f"{name}-cold": replace(CONDITIONS[PART_COLD], **_ORDERS, size=size, note=f"{size // 1000} kB of orders")
    for name, size in ORDER_SIZES.items()
}
CONDITIONS |= {
    f"{name}-on": replace(
        CONDITIONS[PART_ON], **_ORDERS, size=size, start=f"{name}-cold", note=f"{size // 1000} kB of orders, continued"
    )
    for name, size in ORDER_SIZES.items()
}
MID_ALL, ORDERS_ON, ORDERS_ALL = "qwen-problems-mid-all", "qwen-orders-few-on", "qwen-orders-few-all"
CONDITIONS |= {
    name: replace(CONDITIONS[on], size=10_000_000, note=f"{CONDITIONS[on].note}; all prompts")
    for name, on in ((MID_ALL, MID_ON), (ORDERS_ALL, ORDERS_ON))
}
"""Completions need prompts alone: of all of them, where the cold start had few answers. Text has all the answers."""
GERMAN_TEACHER, TWO_TEXTS = "gemma-on-german", "qwen-two-texts"
CONDITIONS |= {
    GERMAN_TEACHER: Condition(
        GEMMA3, QWEN15, "manual-de", 6_000_000, ("python-packages", "handbook-en"), 160, rates=(5e-5,),
        note="Gemma 3 270M, to be a teacher", evaluations=2, contexts=(512, 512), documents=32, compiles=False,
    ),
    TWO_TEXTS: Condition(
        SMOLLM2, QWEN15, "python-packages", 3_000_000, ("manual-de", "handbook-en"), 160, rates=(4e-4, 8e-4),
        note="and manual-de", evaluations=2, contexts=(1024, 1024), documents=12, second="manual-de",
        second_teacher=GERMAN_TEACHER, compiles=False,
    ),
}  # fmt: skip

PATIENCE = 2
"""A run ends after so many evaluations in a row that were no better on validation than its best one."""
EVAL_BYTES = 80_000
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Cell:
    """One run: a method with its weights and learning rate, on a condition and a data seed."""

    condition: str
    method: str
    weight: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The run's name."""
        return f"{self.condition}-{self.method.replace('_', '-')}-{self.weight}-{self.rate:g}-s{self.seed}"

    @property
    def text(self) -> str:
        """File of the training text, below `texts`."""
        return f"{self.condition}.s{self.seed}.jsonl"

    @property
    def texts(self) -> dict[str, str]:
        """Files of the training texts, below `texts`, by their sources: one, or the condition's two."""
        condition = CONDITIONS[self.condition]
        second = {condition.second: f"{self.condition}.{condition.second}.s{self.seed}.jsonl"}
        return {condition.source: self.text} | (second if condition.second else {})


def cells(
    conditions: tuple[str, ...], methods: tuple[str, ...], weights: tuple[str, ...], seeds: tuple[int, ...]
) -> Iterator[Cell]:
    """Yield the runs in order of conditions, seeds and methods; every method has every learning rate."""
    for condition in conditions:
        for seed in seeds:
            for method in (name for name in methods if CONDITIONS[condition].second or not METHODS[name].second):
                for weight in METHODS[method].weights:
                    if not weights or weight in weights or len(METHODS[method].weights) == 1:
                        yield from (Cell(condition, method, weight, rate, seed) for rate in CONDITIONS[condition].rates)
