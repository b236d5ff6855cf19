"""All attacks by name, and how one runs in a process of its own."""

import random
from multiprocessing.connection import Connection

import httpx

from tests.attack import connections, files, http_client, model_server, queue_peer, run_directory
from tests.attack.target import Attack, FaultError, Target

ATTACKS: dict[str, Attack] = {
    **queue_peer.ATTACKS, **connections.ATTACKS, **http_client.ATTACKS, **files.ATTACKS, **run_directory.ATTACKS,
    **model_server.ATTACKS,
}  # fmt: skip

NO_ANSWER = "no answer"


def run_attack(name: str, target: Target, seed: int, seconds: float, result: Connection) -> None:
    """Run one attack in this process, and send the fault that it saw, or an empty text."""
    try:
        ATTACKS[name](target, random.Random(seed), seconds)
        result.send("")
    except FaultError as error:
        result.send(str(error))
    except httpx.TimeoutException as error:
        result.send(f"{NO_ANSWER} to {error.request.method} {str(error.request.url)[:200]}")
    except Exception as error:
        result.send(f"the attack failed: {type(error).__name__}: {str(error)[:300]}")
