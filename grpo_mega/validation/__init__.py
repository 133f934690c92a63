"""Every rule that a config, its model, its data and this machine must meet before a GPU is taken or a rank is started.

Each subject has generators that yield a line for each broken rule: layout, model, precision, engine, rewards, tokenizer. A
file that cannot be read ends its generator with a UserError. The chat template is a program that came with the model: a child
process renders it within bounds of time and memory (`chat_template.py`). Training raises the first problem (`preflight.check`);
the plan lists them all (`findings.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from grpo_mega.errors import ConfigError


def raise_first(problems: Iterable[str]) -> None:
    """Raise ConfigError for the first problem, if there is one."""
    for problem in problems:
        raise ConfigError(problem)
