"""Every rule that a config, its model, its data and the machine must meet before a GPU is taken or a rank starts.

Each subject has generators that yield one line per broken rule: layout (trainer and engines), model, precision,
tokenizer. If a file cannot be read, its generator raises a UserError. `find_problems(config, machine)` asks all of
them, for every command, and has the rules of rewards and teachers (`findings.py`). Ranks ask only for what needs their
device. A rule that needs only the config is in `config/`.
"""

from grpo_mega.cli.preflight.findings import Findings, check_config, find_all, find_problems, job_problems, start_notes
from grpo_mega.cli.preflight.machine import Machine, this_machine
from grpo_mega.cli.preflight.precision import resolve_dtype

__all__ = [
    "Findings",
    "Machine",
    "check_config",
    "find_all",
    "find_problems",
    "job_problems",
    "resolve_dtype",
    "start_notes",
    "this_machine",
]
