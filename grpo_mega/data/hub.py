"""Ask once if the Hugging Face hub answers, because its libraries retry for half a minute if it does not."""

from __future__ import annotations

import functools
import os
import sys
import threading
import urllib.error
import urllib.request

SECONDS_TO_ANSWER = 5.0
VARIABLE = "HF_HUB_OFFLINE"


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def use_cache_if_unreachable() -> bool:
    """Make the libraries of this process and its children use only their cache if the hub does not answer.

    Return True if only the cache is used.
    """
    if os.environ.get(VARIABLE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    if answers(endpoint()):
        return False
    os.environ[VARIABLE] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # they have read the variable if they are imported
        if name in sys.modules:
            setattr(sys.modules[name], VARIABLE, True)
    return True


@functools.cache
def answers(url: str) -> bool:
    """Return True if a server answers within SECONDS_TO_ANSWER, with whatever status."""
    found: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS_TO_ANSWER):
                found.append(True)
        except urllib.error.HTTPError:
            found.append(True)
        except (OSError, ValueError):
            found.append(False)

    thread = threading.Thread(target=ask, daemon=True)  # a timeout does not end the resolution of a name
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return found == [True]
