"""Every rule that a config, its model, its data and this machine must meet before a GPU is taken or a rank starts.

Each subject has generators that yield one line per broken rule: layout, model, precision, engine, rewards, tokenizer. If a file
cannot be read, its generator raises a UserError. The chat template is a program from the model's folder, so a child process
renders it within limits of time and memory (`chat_template.py`). Training raises the first problem (`preflight.check`); the
plan lists all problems (`findings.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from grpo_mega.errors import ConfigError


def raise_first(problems: Iterable[str]) -> None:
    """Raise ConfigError for the first problem, if there is one."""
    for problem in problems:
        raise ConfigError(problem)
