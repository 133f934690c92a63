"""Every rule that a config, its model, its data and the machine must meet before a GPU is taken or a rank starts.

Each subject has generators that yield one line per broken rule: layout (trainer and engines), model, precision,
tokenizer. If a file cannot be read, its generator raises a UserError. `find_violations(config, machine)` asks all of
them, for every command, and has the rules of rewards and teachers (`violations.py`). Ranks ask only for what needs
their device. A rule that needs only the config is in `config/`.
"""

from grpo_mega.cli.checks.machine import Machine, this_machine
from grpo_mega.cli.checks.precision import resolve_dtype
from grpo_mega.cli.checks.violations import (
    Violations,
    check_config,
    find_all,
    find_violations,
    job_problems,
    start_notes,
)

__all__ = [
    "Machine",
    "Violations",
    "check_config",
    "find_all",
    "find_violations",
    "job_problems",
    "resolve_dtype",
    "start_notes",
    "this_machine",
]
