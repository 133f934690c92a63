"""A run folder as training leaves it, created without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_mega import config as configs

LOGS = ("metrics.jsonl", "samples.jsonl", "heldout-000000.jsonl", "heldout-000012.jsonl", "messages.jsonl", "run.json")
# Text that tries to escape from its HTML element.
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> <!-- & \u2028"


def make_run(folder: Path, *, num_steps: int = 12, num_planned: int = 12, response: str = "a<b") -> Path:
    """Create a run folder as training leaves it."""
    folder.mkdir(parents=True)
    raw = {"run_dir": str(folder), "steps": num_planned, "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    (folder / "config.yaml").write_text(configs.dump(configs.validate(raw)))
    start = {
        "time": "2026-01-01T00:00:00+0000",
        "host": "node-1",
        "num_ranks": 4,
        "command": ["grpo-mega", "train", "c.yaml"],
        "python": "3.11",
    }
    (folder / "run.json").write_text(json.dumps({"starts": [start | {"versions": {"torch": "2.13.0"}, "git": "abc"}]}))
    lines = [{"step": 0, "eval/score": 0.5, "seconds/evaluation": 1.0}]
    for step in range(1, num_steps + 1):
        seconds = {"seconds/sample": 2.0, "seconds/update": 1.0, "seconds/other": 0.5, "seconds/step": 3.5}
        rewards = {"reward/mean": step / 12, "reward/accuracy": step / 12, "verdict/accuracy/correct": step / 12}
        rest = {
            "kl/mean": 0.01 * step,
            "entropy/mean": 1.0 - 0.01 * step,
            "response_length/mean": 30.0 + step,
            "clip/fraction": 0.0,
            "lr": 1e-6,
        }
        lines.append(
            {
                "step": step,
                **rewards,
                **rest,
                **seconds,
                "mismatch/abs_mean": 1e-6 * step,
                "num_tokens": 900.0 + step,
                "new/metric": step % 2,
            }
        )
    lines.append({"step": num_steps, "eval/score": 0.75, "seconds/evaluation": 1.5})
    write_lines(folder / "metrics.jsonl", lines)
    rows = [row for step in range(1, num_steps + 1) for row in make_group(step, response)]
    write_lines(folder / "samples.jsonl", rows)
    answers = [
        {"id": i, "prompt": f"p{i}", "response": response, "scores": {"accuracy": float(i % 2)}} for i in range(4)
    ]
    write_lines(folder / "heldout-000000.jsonl", answers)
    write_lines(folder / "heldout-000012.jsonl", [row | {"scores": {"accuracy": 1.0}} for row in answers])
    write_lines(
        folder / "messages.jsonl", [{"step": 3, "time": "t", "level": "warning", "text": "a gradient norm jumped"}]
    )
    return folder


def make_group(step: int, response: str, size: int = 3) -> list[dict[str, Any]]:
    ends = list(range(1, len(response) + 1))
    return [
        {
            "step": step,
            "prompt_id": step,
            "group": 0,
            "index": i,
            "policy_version": step - 1,
            "prompt": f"what is {step}?",
        }
        | {
            "response": response,
            "answer": "4",
            "finish_reason": "stop",
            "reward": float(i),
            "rewards": {"accuracy": float(i)},
        }
        | {"verdicts": {"accuracy": "correct" if i else "wrong"}, "advantage": i - 1.0, "token_ends": ends}
        | {"rollout_logprobs": [-0.5 * i] * len(ends), "mismatch": [1e-4] * len(ends)}
        for i in range(size)
    ]


def make_conversation(step: int) -> dict[str, Any]:
    """Return the row of an agent's sample: two turns with a tool, a rewritten history, and a turn."""
    row = make_group(step, "callRESULTdone?again", size=1)[0]
    messages = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "name": "add", "content": HOSTILE},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "again"},
    ]
    advantages = [*[0.5] * 4, *[0.0] * 6, *[0.5] * 4, 0.0, *[-1.0] * 5]
    own = {"turns": [[0, 4], [10, 14], [15, 20]], "contexts": [[14, f"new history {HOSTILE}"]], "messages": messages}
    return row | own | {"finish_reason": "turns", "turn_rewards": [[13, 0.25]], "advantages": advantages}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
