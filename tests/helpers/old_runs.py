"""Write five small runs that stopped after a checkpoint, and record how they end, are exported and evaluated.

    PYTHONPATH=CHECKOUT python tests/helpers/old_runs.py FOLDER && tar -C FOLDER -cJf tests/trainer/old_runs.tar.xz .

tests/trainer/old_runs.tar.xz holds those of version 0.1. Only the command line is used, so the script runs with any
version. Paths in the configs are relative to FOLDER.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SAVED, LAST = 2, 3  # each run has checkpoints after these steps
PARTIAL = {"partial": True, "oversample": 1.75, "stop_token_ids": [*range(9, 60, 5)]}
SMALL = {"hidden_size": 16, "intermediate_size": 10}
# By kind: family and fields of the model, settings of its section, and settings of the run.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen2", SMALL | {"num_hidden_layers": 3, "tied": True}, {}, {"rollout": PARTIAL}),
    "moe": ("qwen3_moe", SMALL | {"num_hidden_layers": 2, "num_experts": 3, "moe_intermediate_size": 6}, {}, {}),
    "mla": (
        "deepseek_v3",
        SMALL | {"num_hidden_layers": 2, "q_lora_rank": 5, "n_routed_experts": 6, "moe_intermediate_size": 6},
        {"router": {"bias_update_rate": 0.05}},
        {},
    ),
    "lora": (
        "llama",
        SMALL | {"num_hidden_layers": 2},
        {"lora": {"rank": 3, "alpha": 24.0, "targets": ["q", "o", "up"]}},
        {},
    ),
    "sft": ("qwen3", SMALL | {"num_hidden_layers": 2}, {}, {}),
}
COMMON: dict[str, Any] = {
    "steps": LAST,
    "seed": 3,
    "device": "cpu",
    "code_dir": "code",
    "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2},
    "checkpoint": {"interval": 1, "keep": LAST},
    "log": {"progress": False},
}
GRPO: dict[str, Any] = {
    "algorithm": {"group_size": 4, "kl_beta": 0.01},
    "rewards": {"functions": [{"name": "vowels.py:share_of_vowels"}], "num_workers": 1},
    "eval": {"interval": SAVED},
}
REWARD = '''def share_of_vowels(prompt, response, answer, extras):
    """Return a reward that varies even if the model is untrained."""
    return sum(c in "aeiou" for c in response) / max(1, len(response))
'''


def main(folder: str) -> None:
    from tests.helpers.models import make_model, save_checkpoint

    root = Path(folder).resolve()
    (root / "data").mkdir(parents=True)
    (root / "code").mkdir()
    (root / "code/vowels.py").write_text(REWARD)
    numbers = ["one", "two", "three", "four", "five", "six", "seven\u2028eight"]
    rows = [{"prompt": f"{a} {b}?", "answer": a} for a in numbers for b in numbers]
    write_rows(root / "data/train.jsonl", rows[:36])
    write_rows(root / "data/heldout.jsonl", rows[36:43])
    write_rows(root / "data/sft.jsonl", [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows])
    for kind, (family, fields, settings, changes) in KINDS.items():
        save_checkpoint(make_model(family, **fields), root / kind / "model")
        config = COMMON | {"run_dir": f"{kind}/run", "model": {"path": f"{kind}/model", "dtype": "float32"} | settings}
        batch = {"prompts_per_step": 4, "tokens_per_micro_batch": 256}
        if kind == "sft":
            config |= {"data": {"train": "data/sft.jsonl", "heldout_size": 6, "max_length": 60}, "batch": batch}
        else:
            data = {"train": "data/train.jsonl", "heldout": "data/heldout.jsonl", "max_prompt_length": 48}
            rollout = {"max_response_length": 12} | changes.get("rollout", {})
            config |= GRPO | {"data": data, "rollout": rollout, "batch": batch | {"mini_batches": 2}}
        (root / kind / "config.json").write_text(json.dumps(config))
        command(root, "sft" if kind == "sft" else "train", f"{kind}/config.json")
        run_dir = root / kind / "run"
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        stop_after_checkpoint(run_dir)
        expected = {"rows": [row for row in rows if row["step"] == LAST], **use(root, kind)}
        (root / kind / "expected.json").write_text(json.dumps(expected, indent=1))


def stop_after_checkpoint(run_dir: Path) -> None:
    """Remove what a run wrote after step SAVED, and what another machine does not need."""
    for path in (*run_dir.glob("checkpoints/step-*"), *run_dir.glob("heldout-*"), run_dir / "hf", run_dir / "adapter"):
        if not path.stem.endswith(f"{SAVED:06d}"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    (run_dir / "checkpoints/latest").write_text(f"step-{SAVED:06d}\n")
    for name in ("report.html", "curves.png", "lock"):
        (run_dir / name).unlink(missing_ok=True)
    record = json.loads((run_dir / "run.json").read_text())
    for start in record["starts"]:
        start |= {"host": "node-1", "machine": start["machine"] | {"system": "Linux", "processor": "x86_64"}}
    (run_dir / "run.json").write_text(json.dumps(record, indent=1))


def use(root: Path, kind: str) -> dict[str, Any]:
    """Export and evaluate a run. Return digests of the exported files, and the greedy answers."""
    command(root, "export", f"{kind}/run", "exported")
    files = sorted(path for path in (root / "exported").iterdir() if path.name != "grpo_mega.json")  # it has the time
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    rewards = 'rewards.functions=[{"name": "vowels.py:share_of_vowels"}]'
    command(root, "eval", f"{kind}/run", "--data", "data/heldout.jsonl", "--out", "answers.jsonl", "--set", rewards)
    answers = [json.loads(line) for line in (root / "answers.jsonl").read_text().splitlines()]
    shutil.rmtree(root / "exported")
    (root / "answers.jsonl").unlink()
    return {"exported": digests, "answers": [(row["token_ids"], row["scores"]) for row in answers]}


def command(root: Path, *arguments: str) -> str:
    """Run grpo-mega in `root`. Return its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "grpo_mega.cli", *arguments]
    output = subprocess.PIPE
    done = subprocess.run(command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
