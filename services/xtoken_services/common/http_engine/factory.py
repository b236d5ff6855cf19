"""Opening of servers: the one module that knows every program."""

from __future__ import annotations

from xtoken_core.config.served import ServedSpec
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.http_engine.engine import Engine
from xtoken_services.common.http_engine.pool import EnginePool
from xtoken_services.common.http_engine.sglang import SglangEngine
from xtoken_services.common.http_engine.vllm import VllmEngine


def open_engine(served: ServedSpec, field: str, vocab_size: int) -> Engine:
    """Return the client of the servers that settings name; nothing is sent yet.

    Args:
        served: The settings, with an address at least.
        field: Their name in the run file, such as `teacher.0`, for errors.
        vocab_size: Tokens of the model's vocabulary.

    Raises:
        InputError: The file with the key cannot be read.
        ConfigError: It holds no key, or an address lies outside what the control plane allows.
    """
    roots = Roots.of_environment()
    if roots is not None:
        roots.check_urls(served.url, f"{field}.url")
    kind = {"vllm": VllmEngine, "sglang": SglangEngine}[served.url_engine]
    return kind(EnginePool(served, field), served.url_model, vocab_size)
