"""Run one contestant: `contestant.py trl|ours TASK MICRO_BATCH TOKENS_PER_MICRO_BATCH`, started by __main__.py."""

from __future__ import annotations

import sys

from grpo_mega import console
from tools.benchmarks.vs_trl.channel import Channel
from tools.benchmarks.vs_trl.task import Task


def main() -> None:
    name, task, micro_batch, tokens = sys.argv[1:]
    channel = Channel()
    if name == "trl":
        from tools.benchmarks.vs_trl.peer import serve as serve_trl

        serve_trl(Task.from_json(task), channel, int(micro_batch))
    else:
        from tools.benchmarks.vs_trl.ours import serve as serve_ours

        serve_ours(Task.from_json(task), channel, int(tokens))


if __name__ == "__main__":
    console.install()
    main()
