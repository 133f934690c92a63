"""Checks a config against the files that it names, before any process or device is taken; never imports torch."""

from __future__ import annotations

from pathlib import Path

from grpo_mega.config import Config
from grpo_mega.errors import ConfigError


def check(config: Config) -> None:
    """Raises ConfigError in one line for the first thing that cannot work."""
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path={config.model.path} holds no config.json; name the folder of a Hugging Face checkpoint")
    _check_file("data.train", config.data.train)
    if config.data.heldout is not None:
        _check_file("data.heldout", config.data.heldout)


def _check_file(key: str, path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"{key}={path} is not a file; name an existing data file")
