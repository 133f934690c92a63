"""Run the command line in a new Python, and list what it imports."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"torch", "transformers", "megatron", "numpy", "matplotlib", "wandb", "rich", "sglang"}
PROGRAM = """
import sys, json
from grpo_mega import cli
try: code = cli.main(sys.argv[1:])
except SystemExit as end: code = end.code
print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))
sys.exit(code)
"""


def run_command(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new Python. The last line of its output lists the modules that it imported."""
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Return the top-level modules that a command has imported at its end."""
    return set(json.loads(done.stdout.splitlines()[-1]))
