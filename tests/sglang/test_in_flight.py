"""Weights that change during a response: every token's log-prob must come from the policy version of its span."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_mega.distributed.launch import run_ranks
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.sglang, pytest.mark.usefixtures("preloaded_python")]

ROLLOUT = {
    "engine": "sglang",
    "placement": "separate",
    "max_staleness": 3,
    "max_response_length": 70,
    "max_concurrent": 24,
    "stop_token_ids": [*range(3, 243, 80)],
    "mismatch_stop": None,  # stale weights would trip it
}
REWARD = """
def num_vowels(prompt, response, answer, extras):
    return sum(c in "aeiou" for c in response) / 70  # rewards length, because short responses would not cross an update
"""
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("num_steps", "num_tokens", "tp"),
    [
        pytest.param(10, 200, 1, marks=pytest.mark.full),
        *(pytest.param(60, 10_000, tp, marks=pytest.mark.sweep) for tp in (1, 2)),
    ],
)
def test_every_log_prob_comes_from_the_version_of_its_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int, num_tokens: int, tp: int
) -> None:
    """transformers computes the log-probs from a checkpoint of each version, also for tokens after an update during a
    response."""
    config = kills.write_inputs(tmp_path, "dp=1", ROLLOUT | {"tp": tp})
    raw = json.loads(config.read_text())
    raw |= {"steps": num_steps, "checkpoint": {"interval": 0}, "eval": {"num_prompts": 1}}
    raw["layout"]["engine_ranks"] = tp
    raw["batch"] = {"prompts_per_step": 2, "tokens_per_micro_batch": 512}
    raw["algorithm"] |= {"recipe": "partial", "group_size": 3}
    raw["rewards"]["functions"] = [{"name": "reward.num_vowels"}]
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(64)]
    Path(raw["data"]["train"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(json.dumps(raw))
    folder = tmp_path / "recorded"
    folder.mkdir()
    arguments = ["train", str(config), "--set", f"run_dir={tmp_path / 'run'}"]
    command = [sys.executable, str(Path(__file__).with_name("recorded_rank.py")), str(folder), *arguments]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the reward function
    assert run_ranks(command, 1 + tp, tmp_path / "logs") == 0
    by_version = defaultdict(list)
    num_crossing = 0
    for step in range(1, num_steps + 1):
        for prompt, response, logprobs, spans in torch.load(folder / f"step-{step}.pt", weights_only=False):
            num_crossing += len(response) if len(spans) > 1 else 0
            assert all(step - 1 - 3 <= span.version <= step - 1 for span in spans)
            for span in spans:
                by_version[span.version].append((prompt + response[: span.end], logprobs[span.start : span.end]))
    assert num_crossing > num_tokens, "too few responses were in progress when weights changed"
    worst = max(difference(folder / f"version-{v}", spans) for v, spans in by_version.items() if v > 0)
    others = max(
        difference(folder / f"version-{v}", by_version[v + 1]) for v in range(1, num_steps - 1) if by_version[v + 1]
    )
    print(
        f"{num_crossing} tokens in responses across an update: at most {worst:.2g}; with the previous version"
        f" {others:.2g}"
    )
    assert worst < TOLERANCE and others > 100 * TOLERANCE


def difference(checkpoint: Path, spans: list[tuple[list[int], list[float]]]) -> float:
    """Return the largest difference of the engine's log-probs, given for the last tokens of each sequence, from
    transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    longest = max(len(tokens) for tokens, _ in spans)
    ids_BT = torch.zeros((len(spans), longest), dtype=torch.int64)
    for row, (tokens, _) in enumerate(spans):
        ids_BT[row, : len(tokens)] = torch.tensor(tokens)
    with torch.no_grad():
        logprobs_BT = model(ids_BT).logits[:, :-1].log_softmax(-1).gather(2, ids_BT[:, 1:, None]).squeeze(2)
    found = [
        (logprobs_BT[row, len(tokens) - 1 - len(given) : len(tokens) - 1] - torch.tensor(given)).abs().max().item()
        for row, (tokens, given) in enumerate(spans)
    ]
    return max(found)
