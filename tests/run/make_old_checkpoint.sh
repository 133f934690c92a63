#!/usr/bin/env bash
# Makes tests/run/old_checkpoint.tar.xz: a run stopped after step 3 by the code of COMMIT, and the metrics of the same run without
# a stop. tests/run/test_old_checkpoint.py resumes it with today's code. Usage: tests/run/make_old_checkpoint.sh COMMIT
set -euo pipefail

commit="$(git rev-parse --verify "${1:?usage: make_old_checkpoint.sh COMMIT}^{commit}")"
root="$(git rev-parse --show-toplevel)"
folder="$(mktemp -d)"
trap 'git -C "$root" worktree remove --force "$folder/code"; rm -rf "$folder"' EXIT
git -C "$root" worktree add --quiet --detach "$folder/code" "$commit"
mkdir "$folder/run"
cd "$folder/run"

export PYTHONPATH="$folder/code:$folder/run" OMP_NUM_THREADS=1
python="$root/.venv/bin/python"
"$python" "$folder/code/examples/tiny_random_model.py" model
"$python" - << 'EOF'
import json
from pathlib import Path

path = Path("model/config.json")  # tied, and nothing a multiple of 64
sizes = {"hidden_size": 20, "intermediate_size": 36, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10}
layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5, "tie_word_embeddings": True}
path.write_text(json.dumps(json.loads(path.read_text()) | sizes | layers))
rows = [{"prompt": f"Say {word}.", "answer": word} for word in "one two three four five six seven".split()]
Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
Path("vowels.py").write_text(
    "def share(prompt, response, answer, extras):\n    return sum(c in 'aeiou' for c in response) / max(1, len(response))\n"
)
config = {
    "steps": 5,
    "seed": 3,
    "run_dir": "whole",
    "model": {"path": "model", "init": "random", "dtype": "float32"},
    "data": {"train": "train.jsonl", "max_prompt_length": 32},
    "rollout": {"max_response_length": 11},
    "algorithm": {"group_size": 3, "kl_beta": 0.01},
    "rewards": {"functions": [{"name": "vowels.share"}], "num_workers": 1},
    "batch": {"prompts_per_step": 3, "mini_batches": 1, "tokens_per_micro_batch": 128},
    "optimizer": {"lr": 1e-3},
    "log": {"progress": False},
}
Path("config.json").write_text(json.dumps(config, indent=1) + "\n")
EOF
"$python" -m grpo_mega.cli train config.json
"$python" -m grpo_mega.cli train config.json --set run_dir=stopped --set steps=3 --set layout.pp=2 --set checkpoint.interval=3
mv whole/metrics.jsonl expected.jsonl
rm -rf whole stopped/hf stopped/report.html __pycache__
echo "$commit" > commit
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --create . | xz -9e > "$root/tests/run/old_checkpoint.tar.xz"
ls -l "$root/tests/run/old_checkpoint.tar.xz"
