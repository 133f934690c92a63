"""Messages of this run: JSON or arrays with an HMAC-SHA256 over the message and its name, with the run's key.

The job's store and gloo have no passwords, so anyone who reaches their ports can write to them. If no rank of this run
wrote a message, or a rank wrote it under another name, the message is refused before it is parsed. Nothing is
unpickled. The launcher creates the key and passes it by the environment. Ranks that torchrun started share a key by a
file that only this user reads.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed import Store

from grpo_mega.distributed.launch import KEY_VARIABLE
from grpo_mega.errors import ConfigError, EngineError
from grpo_mega.paths import RUN_KEY

MAC_BYTES = hashlib.sha256().digest_size
SHORTEST_KEY = 16  # characters
SECONDS_FOR_THE_FILE = 60.0  # other nodes may see a file on a shared disk late
_DIGEST = "run_key/digest"  # the digest's key in the store


def seal(name: str, message: bytes) -> bytes:
    """Return the MAC and the message. Each message of a run must have a unique name."""
    return _mac(name, message) + message


def unseal(name: str, sealed: bytes | memoryview) -> memoryview:
    """Return the message. Raise EngineError if no rank of this run sealed it under this name."""
    view = memoryview(sealed)
    if not hmac.compare_digest(_mac(name, view[MAC_BYTES:]), view[:MAC_BYTES]):
        raise forged(name)
    return view[MAC_BYTES:]


def seal_value(name: str, value: Any) -> str:
    """Return a JSON value and its MAC as one line of ASCII. Numbers and texts round-trip exactly, even NaN and
    infinity.
    """
    text = json.dumps(value)
    return f"{_mac(name, text.encode()).hex()} {text}"


def unseal_value(name: str, sealed: str | bytes) -> Any:
    """Return the value. Raise EngineError if no rank of this run sealed it under this name."""
    mac, _, text = (sealed.encode(errors="replace") if isinstance(sealed, str) else sealed).partition(b" ")
    if not hmac.compare_digest(_mac(name, text).hex().encode(), mac):
        raise forged(name)
    return json.loads(text)


def forged(name: str) -> EngineError:
    return EngineError(
        f"{name}: has a value that no rank of this run wrote; keep other users and programs off the job's ports "
        "(slurm/README.md, Nodes that others use too), then continue from the last checkpoint with --resume"
    )


@functools.cache
def run_key() -> bytes:
    """Return the run's key from the environment. Without one create a key, which is enough for a run of one process.

    Remove the key from the environment, so child processes do not get it.
    """
    key = os.environ.pop(KEY_VARIABLE, None)
    if key is not None and len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"{KEY_VARIABLE}: must have at least {SHORTEST_KEY} characters; use the output of `openssl rand -hex 32`"
        )
    return (key or secrets.token_hex(32)).encode()


@contextlib.contextmanager
def shared_key(store: Store, rank: int, world_size: int, folder: Path) -> Iterator[None]:
    """If the launcher set no key, share one between all ranks by a file in `folder`. The context removes the file at
    its end.

    All ranks enter the context and leave it after all have entered. The store only has a digest of the key. Raise
    ConfigError if the file does not appear on this node.
    """
    if KEY_VARIABLE in os.environ or world_size == 1 or run_key.cache_info().currsize:
        run_key()
        yield
        return
    path = folder / RUN_KEY
    if rank != 0:
        digest = store.get(_DIGEST).decode(errors="replace")
        until = time.monotonic() + SECONDS_FOR_THE_FILE
        while True:
            with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                key = file.read()
                is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
                if is_ours and hashlib.sha256(key).hexdigest() == digest:
                    os.environ[KEY_VARIABLE] = key.decode()
                    break
            if time.monotonic() > until:
                raise ConfigError(
                    f"{path}: must hold this job's key within {SECONDS_FOR_THE_FILE:.0f} s; set {KEY_VARIABLE} to the"
                    " same random text on all nodes, or put run_dir on a disk that all nodes share"
                )
            time.sleep(0.1)
        run_key()
        yield
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a killed start may have left one
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(run_key())
    try:
        store.set(_DIGEST, hashlib.sha256(run_key()).hexdigest())
        yield
    finally:
        path.unlink(missing_ok=True)


def _mac(name: str, message: bytes | memoryview) -> bytes:
    code = hmac.new(run_key(), f"{name}\0".encode(), hashlib.sha256)
    code.update(message)
    return code.digest()
