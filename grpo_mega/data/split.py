"""Split held-out prompts off from the training prompts.

The choice depends on the prompts' texts alone (the smallest hashes), not on the seed or the order, so that runs with different
seeds are compared on the same prompts. No text is on both sides: a training prompt with the text of a held-out one is
dropped. The held-out prompts come in the order of their hashes, so that any first N of them come from all sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from grpo_mega.errors import ConfigError
from grpo_mega.types import Prompt


def split_off(sets: Sequence[list[Prompt]], size: int) -> tuple[list[list[Prompt]], list[Prompt]]:
    """Return (the remaining prompts of each set, `size` held-out prompts with distinct texts).

    Raises ConfigError if too little remains.
    """
    by_text = {prompt.text: prompt for prompts in reversed(sets) for prompt in reversed(prompts)}  # the first of each text
    if size >= len(by_text):
        raise ConfigError(
            f"{size} held-out prompts leave nothing of the {len(by_text)} different prompts of data.train; "
            "lower data.heldout_size or data.heldout_fraction"
        )
    heldout = [by_text[text] for text in sorted(by_text, key=_hash)[:size]]
    heldout_texts = {prompt.text for prompt in heldout}
    train = [[prompt for prompt in prompts if prompt.text not in heldout_texts] for prompts in sets]
    for number, prompts in enumerate(train):
        if not prompts:
            raise ConfigError(
                f"{size} held-out prompts leave none of data.train.{number}; lower data.heldout_size or data.heldout_fraction"
            )
    return train, heldout


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
