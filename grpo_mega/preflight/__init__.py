"""Every rule that a config, its model, its data and the machine must meet before a GPU is taken or a rank starts.

Each subject has generators that yield one line per broken rule: layout, model, precision, engine, rewards, tokenizer. If a file
cannot be read, its generator raises a UserError. The chat template is a program from the model's folder, so a child process
renders it within limits of time and memory (`chat_template.py`). `find_problems(config, machine)` asks all of them, for every
command (`findings.py`). Ranks ask only for what needs their device.
"""

from grpo_mega.preflight.findings import Findings, check, find_all, find_problems, job_problems
from grpo_mega.preflight.machine import Machine, this_machine

__all__ = ["Findings", "Machine", "check", "find_all", "find_problems", "job_problems", "this_machine"]
