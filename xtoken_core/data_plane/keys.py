"""CURVE keys for a queue on a network.

A directory of keys holds, for the queue: `queue.key_secret` and the public keys of its clients in `clients/`; for a
client: `queue.key`, the queue's public key, and its own `client.key_secret`. The files are those of pyzmq's
certificates; secret ones are readable by their owner only.
"""

from __future__ import annotations

from pathlib import Path

from zmq.auth import create_certificates, load_certificate

from xtoken_core.errors import InputError, os_errors_as

QUEUE, CLIENT, CLIENTS = "queue", "client", "clients"


def create_queue_keys(directory: Path) -> Path:
    """Create the queue's key pair and the empty list of its clients; return the public key's file.

    Raises:
        InputError: The keys exist already, or the directory cannot be written.
    """
    public = _create(directory, QUEUE)
    (directory / CLIENTS).mkdir(exist_ok=True)
    return public


def create_client_keys(directory: Path) -> Path:
    """Create a client's key pair; return the public key's file, to be copied into the queue's `clients/`.

    Raises:
        InputError: The keys exist already, or the directory cannot be written.
    """
    return _create(directory, CLIENT)


def server_keys(directory: Path) -> tuple[bytes, bytes]:
    """Return the queue's public and secret key.

    Raises:
        InputError: They are missing, unreadable, or readable by others.
    """
    if not (directory / CLIENTS).is_dir():
        raise InputError(f"{directory / CLIENTS} is missing: it lists the clients that may connect, one .key file each")
    return _secret(directory / f"{QUEUE}.key_secret")


def client_keys(directory: Path) -> tuple[bytes, bytes, bytes]:
    """Return the queue's public key, and the client's public and secret one.

    Raises:
        InputError: They are missing, unreadable, or readable by others.
    """
    return _load(directory / f"{QUEUE}.key")[0], *_secret(directory / f"{CLIENT}.key_secret")


def allowed_keys(directory: Path) -> set[bytes]:
    """Return the public keys in a queue's `clients/`; files that are not keys are ignored."""
    keys = set()
    for file in (directory / CLIENTS).glob("*.key"):
        if not file.is_file():  # a named pipe would block the handshakes of all peers
            continue
        try:
            keys.add(_load(file)[0])
        except InputError:
            continue
    return keys


def _create(directory: Path, name: str) -> Path:
    secret = directory / f"{name}.key_secret"
    if secret.exists():
        raise InputError(f"{secret} is there already: remove it first if it shall be replaced")
    with os_errors_as(InputError, f"cannot write keys into {directory}"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        public, made = create_certificates(directory, name)
        Path(made).chmod(0o600)
    return Path(public)


def _secret(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise InputError(f"{path} holds no secret key")
    if path.stat().st_mode & 0o077:
        raise InputError(f"the key file {path} may be read by others: chmod 600 it")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except OSError as error:
        raise InputError(f"cannot read the key file {path}: {error.strerror or 'it is missing'}") from error
    except (ValueError, IndexError) as error:  # pyzmq indexes what follows the "=" of a line, which may have none
        raise InputError(f"{path} is not a key file: {error}") from error
