"""Attacks by a server of a model on the client that a teacher or a rollout worker has."""

import copy
import json
import random
import time
from typing import Any

import psutil

from tests.attack.target import Attack, FaultError, Target
from tests.support.engine_server import RAW_ATTACKS, Answer, flat_top_logprobs, raw_serving, serving
from xtoken_core.config.served import ServedSpec
from xtoken_core.errors import XtokenError
from xtoken_services.common.http_engine.engine import Engine, Sampling
from xtoken_services.common.http_engine.errors import EngineError, EngineRefusalError
from xtoken_services.common.http_engine.pool import EnginePool
from xtoken_services.common.http_engine.sglang import SglangEngine
from xtoken_services.common.http_engine.vllm import VllmEngine

LIMIT_S, MARGIN_S = 1.0, 3.0
MOST_BYTES = 128 << 20
IDS = [3, 1, 2]
ANSWERS: dict[type[Engine], dict[str, Any]] = {
    VllmEngine: {
        "data": [{"id": "m", "max_model_len": 9}], "tokens": IDS,
        "choices": [{
            "finish_reason": "stop", "stop_reason": None, "token_ids": [1],
            "logprobs": {"token_logprobs": [-0.1], "top_logprobs": [{}]},
            "prompt_logprobs": [None, {"1": {"logprob": -1.0}}, {"2": {"logprob": -1.0}}],
        }],
    },
    SglangEngine: {
        "data": [{"id": "m", "max_model_len": 9}], "tokens": IDS,
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": "x"}, "output_token_logprobs": [[-1.0, 1, None]],
            "input_token_logprobs": [[None, 3, None], [-1.0, 1, None], [-1.0, 2, None]],
            "output_top_logprobs": [[]], **flat_top_logprobs([{1: -1.0}, {2: -1.0}], 1, len(IDS)),
        },
    },
}  # fmt: skip
ODD = (None, True, -1, 1 << 70, 1e300, 0.5, "", "x" * 100, [], {}, [[]], {"": None}, [None] * 3, "token_id:-1")


def hostile_exchanges(target: Target, rng: random.Random, seconds: float) -> None:
    """Drip headers, repeat interim answers, send bodies without an end or that decode to gigabytes."""
    end, memory = time.monotonic() + seconds, psutil.Process().memory_info
    for name in rng.sample(sorted(RAW_ATTACKS), len(RAW_ATTACKS)):
        if time.monotonic() > end:
            break
        with raw_serving(RAW_ATTACKS[name]) as url:
            pool = EnginePool(ServedSpec(url=(url,), url_timeout_s=LIMIT_S), "teacher.0")
            before, began = memory().rss, target.clock.now()
            try:
                pool.call("POST", "/v1/completions", {"prompt": IDS}, decode=json.loads)
            except (EngineError, EngineRefusalError):
                pass
            else:
                raise FaultError(f"{name} counts as an answer")
            finally:
                pool.close()
            if (waited := target.clock.since(began)) > LIMIT_S + MARGIN_S:
                raise FaultError(f"{name} held a request of {LIMIT_S:g} s for {waited:.1f} s")
            if (taken := memory().rss - before) > MOST_BYTES:
                raise FaultError(f"{name} took {taken >> 20} MiB")


def hostile_answers(target: Target, rng: random.Random, seconds: float) -> None:
    """Change parts of right answers: each must be read or refused."""
    del target
    end, answers = time.monotonic() + seconds, [b"{}"]

    def answer(*_: object) -> Answer:
        return 200, {}, answers[0]

    with serving(answer) as url:
        engines = [kind(EnginePool(ServedSpec(url=(url,)), "teacher.0"), "m", 9) for kind in ANSWERS]
        try:
            while time.monotonic() < end:
                engine = rng.choice(engines)
                document = json.loads(json.dumps(ANSWERS[type(engine)]))
                for _ in range(rng.randrange(1, 4)):
                    document = changed(document, rng)
                answers[0] = json.dumps(document).encode()
                if rng.random() < 0.1:
                    answers[0] = answers[0][: rng.randrange(len(answers[0]))]
                use(engine, rng, answers[0])
        finally:
            for engine in engines:
                engine.pool.close()


def use(engine: Engine, rng: random.Random, sent: bytes) -> None:
    """Send one request of a kind.

    Raises:
        FaultError: It ends by something else than an answer or an error that names the server.
    """
    replica = engine.pool.replicas[0]
    requests = (
        lambda: engine.served(replica), lambda: engine.tokenize("abc", replica), lambda: engine.score(IDS, 2),
        lambda: engine.complete(IDS, Sampling(4, 0)),
    )  # fmt: skip
    try:
        rng.choice(requests)()
    except XtokenError:
        pass
    except Exception as error:
        raise FaultError(f"{type(error).__name__}: {error} at {sent[:300]!r}") from error


def changed(value: Any, rng: random.Random) -> Any:
    """Return JSON of which one part, at any depth, is another value or missing."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return copy.deepcopy(rng.choice(ODD))
    key = rng.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.1:
        del value[key]
    else:
        value[key] = changed(value[key], rng)
    return value


ATTACKS: dict[str, Attack] = {
    f"model_server.{attack.__name__}": attack for attack in (hostile_exchanges, hostile_answers)
}
