"""The chain divergence once more: sets, dictionaries and loops over single chunks, straight from the definition."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from tests.unit.chain.tiny_tokenizers import TinyTokenizer

S, T = 0, 1
FLOOR = torch.finfo(torch.float64).tiny


class Pair:
    """What two tokenizers are to each other, found by tokenizing strings and nothing else."""

    def __init__(self, student: TinyTokenizer, teacher: TinyTokenizer):
        self.sides = (student, teacher)

    @cached_property
    def identical(self):
        return len({side.fast.backend_tokenizer.to_str() for side in self.sides}) == 1

    @cache  # noqa: B019 - lives as long as a test
    def spell(self, k, token):
        text = self.sides[k].bytes_of(token)
        other = self.sides[1 - k]
        return tuple(other.encode(text)) if all(bytes([byte]) in other.ids for byte in text) else ()

    @cache  # noqa: B019
    def root(self, k, token):
        if token == self.sides[k].end:
            return "end"
        for _ in range(50):
            pieces = self.spell(k, token)
            if not pieces:
                return None
            if len(pieces) == 1 and self.spell(1 - k, pieces[0]) == (token,):
                return (token, pieces[0]) if k == S else (pieces[0], token)
            k, token = 1 - k, pieces[0]
        return None

    @cache  # noqa: B019
    def live(self, k, after):
        """Tokens of side k that the other side's tokenizer lets follow its own token."""
        own, other = self.sides[k], self.sides[1 - k]
        text = other.bytes_of(after)
        if not text or other.encode(text) != [after]:
            return frozenset(range(len(own.vocab)))
        free = {x for x in range(len(own.vocab)) if not self.spell(k, x)}
        tested = (x for x in range(len(own.vocab)) if x not in free)
        return frozenset(free | {x for x in tested if other.cuts(after, own.bytes_of(x))})


@dataclass
class Options:
    conditioning: bool = True
    end_terms: bool = True
    bare_space: bool = True
    form: float | None = None  # KL(student || teacher): 1; a generalised JSD: beta


def classes(pair, k, probabilities, tokens):
    """Mass by root of the given tokens."""
    mass = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for x in tokens:
        mass[pair.root(k, x)] = mass[pair.root(k, x)] + probabilities[x]
    return mass


def conditional(logits, tokens, tail=None):
    """The softmax over some tokens: `{token: probability}`; with a tail, of log-probabilities and this mass."""
    tokens = sorted(tokens)
    values = logits[tokens]
    if tail is not None:
        return dict(zip(tokens, values.exp() / (values.exp().sum() + tail).clamp(min=FLOOR), strict=True))
    weights = torch.exp(values - values.max()) if torch.isfinite(values.max()) else torch.exp(values)
    total = weights.sum()
    return dict(zip(tokens, weights / total.clamp(min=FLOOR), strict=True))


def generated_divergence(p, q, beta):
    """Reverse KL (beta 1) or generalised JSD over the classes that both name, `lost` being q's mass on others."""
    common = [c for c in p if c in q]
    if not common:
        return torch.zeros((), dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    mass = sum((p[c].detach() for c in common), zero)
    kept = sum((q[c] for c in common), zero)
    if kept <= 0 or mass <= 0:
        return zero
    value = zero if beta < 1 else -torch.log(kept)
    for c in common:
        teacher, student = p[c].detach() / mass, q[c]
        if beta == 1:
            # The floors are those of masses, before they are renormalised.
            ratio = (student.clamp(min=FLOOR).log() - kept.log()) - (p[c].detach().clamp(min=FLOOR).log() - mass.log())
            value = value + student / kept * ratio
            continue
        mixture = beta * teacher + (1 - beta) * student
        for weight, x in ((beta, teacher), (1 - beta, student)):
            value = value + weight * x * (x.clamp(min=FLOOR).log() - mixture.clamp(min=FLOOR).log())
    if beta < 1:
        value = value - (1 - beta) * (1 - kept).clamp(min=0) * torch.log(torch.tensor(1 - beta, dtype=torch.float64))
    return value


def divergence(p, q, form=None):
    """`m KL(p / m || q)` over the classes that q names; with a form, that of generated text."""
    if form is not None:
        return generated_divergence(p, q, form)
    p = {c: float(value) for c, value in p.items() if c in q}
    mass = sum(p.values())
    value = torch.zeros((), dtype=torch.float64)
    for c, x in p.items():
        if x > 0:
            value = (
                value
                + x * torch.log(torch.tensor(x / mass, dtype=torch.float64))
                - x * torch.log(q[c].clamp(min=FLOOR))
            )
    return value


def with_rest(p, q, rest, free):
    """Both sides with the classes that may hold the teacher's tail as one: `free`, and those without listed tokens."""
    zero = torch.zeros((), dtype=torch.float64)
    together = {c for c in q if c in free or float(p.get(c, zero)) == 0}
    named = {c: value for c, value in q.items() if c not in together}
    if not together:
        return p, named
    mass = rest + sum((p[c] for c in together if c in p), zero)
    return {**p, "rest": mass}, {**named, "rest": sum((q[c] for c in together), zero)}


def start_term(pair, logits, tokens, before, options, tail=None):
    mass = []
    for k in (S, T):
        live = set(range(len(pair.sides[k].vocab)))
        if options.conditioning and before is not None and not pair.identical:
            live = set(pair.live(k, before[1 - k])) | {tokens[k]}
        if k == T and tail is not None:
            live = {x for x in live if torch.isfinite(logits[T][x])}
            mass.append(classes(pair, T, conditional(logits[T], live, tail), live))
            continue
        mass.append(classes(pair, k, conditional(logits[k], live), live))
    if tail is not None:
        return divergence(*with_rest(mass[T], mass[S], 1 - sum(mass[T].values()), ()), options.form)
    return divergence(mass[T], mass[S], options.form)


def inner_term(pair, holder, path, logits, tail=None, form=None):
    """After the other side's tokens `path`, inside (or after) a token of the holder that begins with them."""
    other = 1 - holder
    vocabulary = range(len(pair.sides[holder].vocab))
    members = [x for x in vocabulary if pair.spell(holder, x)[: len(path)] == path]

    def next_class(x):
        pieces = pair.spell(holder, x)
        return "ends here" if len(pieces) == len(path) else pair.root(other, pieces[len(path)])

    if all(next_class(x) == "ends here" for x in members):
        return 0.0
    held = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for x, probability in conditional(logits[holder], members).items():
        held[next_class(x)] = held[next_class(x)] + probability
    everything = range(len(pair.sides[other].vocab))
    row = logits[other].exp() if tail is not None and other == T else conditional(logits[other], everything)
    by_root = classes(pair, other, row, everything)
    zero = torch.zeros((), dtype=torch.float64)
    fresh = {c: by_root.get(c, zero) for c in held}
    if "ends here" in held:
        fresh["ends here"] = sum((mass for c, mass in by_root.items() if c not in held), zero)
    if tail is not None and holder == S:
        return divergence(*with_rest(fresh, held, tail, {"ends here"}), form)
    return divergence(fresh, held, form) if holder == S else divergence(held, fresh, form)


def sample_divergence(pair, logits, ids, chunk_ids, usable, options, tails=None):
    """Values of one sample's chunks.

    Args:
        logits: Of the student and the teacher, each `[T, V]` float64.
        ids: Lists of tokens.
        chunk_ids: Lists of chunk numbers, -1 = none.
        usable: Which chunks count.
        tails: Of a top-k teacher, whose logits are log-probabilities, the mass that is missing at each position.
    """
    values = []
    for c, counts in enumerate(usable):
        at = [[i for i, chunk in enumerate(chunk_ids[k]) if chunk == c] for k in (S, T)]
        value = torch.zeros((), dtype=torch.float64)
        if not counts or not at[S] or not at[T] or at[S][0] == 0 or at[T][0] == 0:
            values.append(value)
            continue
        before = [chunk_ids[k][at[k][0] - 1] for k in (S, T)]
        cut = before[S] == before[T] >= 0
        last = [ids[k][at[k][0] - 1] for k in (S, T)] if cut else None
        value = value + start_term(
            pair,
            [logits[k][at[k][0] - 1] for k in (S, T)],
            [ids[k][at[k][0]] for k in (S, T)],
            last,
            options,
            None if tails is None else tails[at[T][0] - 1],
        )
        for holder in (S, T):
            other = 1 - holder
            if len(at[holder]) != 1:
                continue
            token, spelled = ids[holder][at[holder][0]], [ids[other][i] for i in at[other]]
            for n in range(1, len(spelled) + 1):
                path = tuple(spelled[:n])
                ends = options.end_terms and pair.sides[holder].ends
                if pair.spell(holder, token)[:n] != path or (n == len(spelled) and not ends):
                    continue
                if not options.bare_space and b"".join(map(pair.sides[other].bytes_of, path)) == b" ":
                    continue
                rows = [None, None]
                rows[holder], rows[other] = logits[holder][at[holder][0] - 1], logits[other][at[other][n - 1]]
                tail = tails[at[T][n - 1]] if tails is not None and holder == S else None
                value = value + inner_term(pair, holder, path, rows, tail, options.form)
        values.append(value)
    return torch.stack(values)
