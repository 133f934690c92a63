"""Rules for a tokenizer's files, checked without transformers: they exist, have a chat template, and fit the vocabulary.

Without a tokenizer.json the vocabulary is checked after the tokenizer is loaded (`check_vocabulary`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.files import read_json
from grpo_mega.preflight.chat_template import check_chat_template

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def check_tokenizer_files(folder: Path, vocab_size: int) -> None:
    """Raise ConfigError if a tokenizer is missing, damaged, without chat template, or larger than the vocabulary."""
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ConfigError(
            f"model.path={folder} holds no tokenizer (none of {', '.join(_VOCABULARIES)}); copy the model's there"
        )
    settings = _read_object(folder / "tokenizer_config.json")
    check_chat_template(folder, settings)
    ids = _token_ids(folder, settings)
    if ids:
        check_vocabulary(folder, max(ids), vocab_size)


def vocabulary_difference(folder: Path, other: Path) -> str | None:
    """Return an example of a token with different ids in two folders' tokenizers; None if they agree on every id."""
    theirs, ours = _vocabulary(folder), _vocabulary(other)
    for token in sorted(theirs.keys() | ours.keys()):
        if theirs.get(token) != ours.get(token):
            return f"{token!r} is {theirs.get(token, 'missing')} there and {ours.get(token, 'missing')} here"
    return None


def _vocabulary(folder: Path) -> dict[str, int | str]:
    """Return the id of each token in a tokenizer.json. Without one, return a digest of each file with a vocabulary."""
    if _token_ids(folder, {}):
        tokenizer = _read_object(folder / "tokenizer.json")
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary if isinstance(vocabulary, dict) else {str(pair[0]): i for i, pair in enumerate(vocabulary)}
        return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    files = [folder / name for name in _VOCABULARIES if (folder / name).is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def check_vocabulary(folder: Path, largest_id: int, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has an id for which the model has no embedding."""
    if largest_id >= vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size} in {folder / 'config.json'} is less than the tokenizer, whose ids go up to {largest_id}; "
            "give the tokenizer that belongs to the model"
        )


def _token_ids(folder: Path, settings: dict[str, Any]) -> list[int]:
    """Return all ids of a tokenizer.json and of the tokens that its settings add; empty without a tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    tokenizer = _read_object(path)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in tokenizer.get("added_tokens") or []]
        return [int(i) for i in [*ids, *(settings.get("added_tokens_decoder") or {})]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is no tokenizer ({error!r}); fetch the file again") from None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object; fetch the file again")
    return value
