"""The losses once more, in float64 and plain loops over samples, positions and chunks: independent of the package.

Only `log`, `exp` and sums of vectors are torch's, so that autograd gives the gradient. Every function returns the KD
term of a whole micro-batch, `T^2` included.
"""

import math

import torch

EPS = 1e-10


def log_probs(row, temperature=1.0):
    row = row / temperature
    return row - row.max() - (row - row.max()).exp().sum().log()


def positions_of(chunk_id, sample, chunk):
    """Predicting positions of a chunk: one before each of its tokens."""
    row = chunk_id[sample].tolist()
    return [i - 1 for i in range(1, len(row)) if row[i] == chunk]


def mean(rows):
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total / (len(rows) + EPS)


def valid_chunks(batch, infix="", exact_only=False):
    """Every (sample, chunk, student positions, teacher positions) that counts."""
    found = []
    pair_valid = batch[f"alignment_{infix}pair_valid"]
    for b in range(pair_valid.shape[0]):
        if batch["sample_mask"][b] == 0:
            continue
        for c in range(pair_valid.shape[1]):
            s = positions_of(batch[f"alignment_{infix}student_chunk_id"], b, c)
            t = positions_of(batch[f"alignment_{infix}teacher_chunk_id"], b, c)
            correct = bool(batch[f"alignment_{infix}pair_is_correct"][b, c])
            if s and t and pair_valid[b, c] and (correct or not exact_only):
                found.append((b, c, s, t))
    return found


def kl(log_p, log_q):
    """Term by term; a term of probability 0 is left out."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(log_p, log_q, strict=True):
        if a > -math.inf:
            total = total + a.exp() * (a - b)
    return total


def dense(teacher, V_s):
    W = torch.zeros(V_s, teacher.vocab_size, dtype=torch.float64)
    for s in range(V_s):
        for t, weight in zip(teacher.indices[s].tolist(), teacher.likelihoods[s].tolist(), strict=True):
            if t >= 0:
                W[s, t] += weight
    return W


def largest_columns(z_t, width, k):
    maxima = [max(float(z_t[b, i, v]) for b in range(z_t.shape[0]) for i in range(z_t.shape[1])) for v in range(width)]
    order = sorted(range(width), key=lambda v: (-maxima[v], v))
    return sorted(order[:k])


def p_kl(
    batch, z_s, z_t, teacher, V_s, *, k=None, T=1.0, reverse=False, exact_only=False, average="log_prob", infix=""
):
    W, V_t = dense(teacher, V_s), teacher.vocab_size
    K = largest_columns(z_t, V_t, min(k or V_t, V_t))
    total, chunks = torch.zeros((), dtype=torch.float64), valid_chunks(batch, infix, exact_only)
    for b, _, s, t in chunks:
        Q = mean([(log_probs(z_s[b, i, :V_s], T).exp() @ W)[K] for i in s])
        log_q = (Q / (Q.sum() + EPS) + EPS).log()
        rows = [log_probs(z_t[b, j][K], T) for j in t]
        L = mean(rows) if average == "log_prob" else (mean([row.exp() for row in rows]) + EPS).log()
        total = total + (kl(log_q, L) if reverse else kl(L, log_q))
    return T**2 * total / max(len(chunks), 1)


def token_map(teacher, V_s, relaxed):
    best = {}
    for s in range(V_s):
        slots = list(zip(teacher.likelihoods[s].tolist(), teacher.indices[s].tolist(), strict=True))
        weight, t = max(slots, key=lambda slot: slot[0])
        pinned = weight == 1.0 and slots[1][1] == -1
        if (weight >= 0.6 if relaxed else pinned) and 0 <= t < teacher.vocab_size:
            rank = (-weight, s) if relaxed else (0, s)
            best[t] = min(best.get(t, rank), rank)
    pairs = sorted((s, t) for t, (_, s) in best.items())
    rest_s = [s for s in range(V_s) if s not in {a for a, _ in pairs}]
    rest_t = [t for t in range(teacher.vocab_size) if t not in {b for _, b in pairs}]
    return [a for a, _ in pairs], [b for _, b in pairs], rest_s, rest_t


def gold(batch, z_s, z_t, teacher, V_s, *, relaxed=False, T=1.0, reverse=False, topk=8192, empty=False, infix=""):
    V_t = teacher.vocab_size
    common_s, common_t, rest_s, rest_t = (
        ([], [], list(range(V_s)), list(range(V_t))) if empty else token_map(teacher, V_s, relaxed)
    )
    total, chunks = torch.zeros((), dtype=torch.float64), valid_chunks(batch, infix)
    for b, _, s, t in chunks:
        S = mean([log_probs(z_s[b, i, :V_s], T) for i in s])
        L = mean([log_probs(z_t[b, j, :V_t], T) for j in t])
        total = total + (kl(S[common_s], L[common_t]) if reverse else kl(L[common_t], S[common_s]))
        a = sorted([S[v].exp() for v in rest_s], key=lambda x: x.item(), reverse=True)
        c = sorted([L[v].exp() for v in rest_t], key=lambda x: x.item(), reverse=True)
        n = max(len(a), len(c)) if empty else min(len(a), len(c), topk)
        for i in range(n):
            x = a[i] if i < len(a) else torch.zeros((), dtype=torch.float64)
            y = c[i] if i < len(c) else torch.zeros((), dtype=torch.float64)
            total = total + (x - y).abs()
    return T**2 * total / max(len(chunks), 1)


def alm(batch, z_s, z_t, teacher, V_s, *, tau=100.0, reverse=False, infix=""):
    total, chunks = torch.zeros((), dtype=torch.float64), valid_chunks(batch, infix)
    ids_s, ids_t = batch["input_ids"], batch[f"teacher_{infix}input_ids"]
    for b, _, s, t in chunks:
        own_s = sum(log_probs(z_s[b, i, :V_s])[ids_s[b, i + 1]] for i in s)
        own_t = sum(log_probs(z_t[b, j, : teacher.vocab_size])[ids_t[b, j + 1]] for j in t)
        p, q = (own_s / tau, own_t / tau) if reverse else (own_t / tau, own_s / tau)
        p, q = p.clamp(max=-EPS).exp(), q.clamp(max=-EPS).exp()
        total = total + p * (p.log() - q.log()) + (1 - p) * ((1 - p).log() - (1 - q).log())
    return total / max(len(chunks), 1)


def same_tokenizer(batch, z_s, z_t, V_s, *, k=None, T=1.0, reverse=False):
    K = largest_columns(z_t, V_s, min(k or V_s, V_s))
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    B, length = batch["input_ids"].shape
    for b in range(B):
        for i in range(length - 1):
            weight = float(batch["token_mask"][b, i + 1] * batch["sample_mask"][b])
            if weight:
                log_q, log_p = log_probs(z_s[b, i][K], T), log_probs(z_t[b, i][K], T)
                total = total + weight * (kl(log_q, log_p) if reverse else kl(log_p, log_q))
                count += weight
    return T**2 * total / (count + 1e-8)


def cross_entropy(z, ids, token_mask, sample_mask):
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for b in range(ids.shape[0]):
        for i in range(ids.shape[1] - 1):
            if token_mask[b, i + 1] * sample_mask[b]:
                total = total - log_probs(z[b, i])[ids[b, i + 1]]
                count += 1.0
    return total / (count + 1e-8)


def score(kind, z, ids, token_mask, sample_mask):
    if kind == "ce":
        return -cross_entropy(z, ids, token_mask, sample_mask)
    total, count = 0.0, 0.0
    for b in range(ids.shape[0]):
        for i in range(ids.shape[1]):
            if token_mask[b, i] * sample_mask[b]:
                p = log_probs(z[b, i]).exp()
                total += float(p.max()) if kind == "max_prob" else float((p * p.log()).sum())
                count += 1.0
    return torch.tensor(total / (count + 1e-8), dtype=torch.float64)
