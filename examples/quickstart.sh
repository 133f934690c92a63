#!/usr/bin/env bash
# Train a small arithmetic model with GRPO on this machine. Needs only Python and pip:
#   examples/quickstart.sh [--out DIR] [--seed N] [--layout tp=2] [--engine embedded|sglang] [--moe | --hybrid | --agent | --game] [--lora] [--short]
# It makes .venv and a small model, trains it by SFT until it answers about half of the prompts correctly, and trains the result with
# GRPO on two processes with real Megatron-core. It evaluates held-out prompts before and after, and writes a Hugging Face checkpoint and
# report.html to DIR. --layout takes tp, pp, dp and ep, for example pp=2 or tp=2,dp=2. --moe trains an MoE model with half of the
# experts on each process and with routing replay, --hybrid a model with linear attention (gated delta net). --agent trains a model
# that calls a calculator, --game a model that guesses a number and is told "higher" or "lower". --lora trains an adapter in GRPO, and
# not in SFT. --short is a quick check: 4 steps of GRPO and 64 held-out prompts.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

out="$ROOT/runs/quickstart" seed=0 layout="" engine=embedded moe="" hybrid="" agent="" game="" lora="" short=""
while [[ $# -gt 0 ]]; do
    case "$1" in
        --out | --seed | --layout | --engine)
            [[ $# -ge 2 ]] || _fail "$1 needs a value; see the head of examples/quickstart.sh"
            declare "${1#--}=$2"
            shift 2
            ;;
        --moe) moe=yes && shift ;;
        --hybrid) hybrid=yes && shift ;;
        --agent) agent=yes && shift ;;
        --game) game=yes && shift ;;
        --lora) lora=yes && shift ;;
        --short) short=yes && shift ;;
        *) _fail "unknown argument '$1'; see the head of examples/quickstart.sh" ;;
    esac
done
[[ "$seed" =~ ^[0-9]+$ ]] || _fail "--seed '$seed' is not a whole number"
[[ "$moe$hybrid$agent$game" =~ ^(yes)?$ ]] || _fail "--moe, --hybrid, --agent and --game exclude one another; use one"
layout="${layout:-${moe:+dp=2,ep=2}}" && layout="${layout:-tp=2}"
[[ "$layout" =~ ^(tp|pp|dp|ep)=[0-9]+(,(tp|pp|dp|ep)=[0-9]+)*$ ]] || _fail "--layout '$layout' is not of the form tp=2 or tp=2,pp=2"
[[ "$engine" =~ ^(embedded|sglang)$ ]] || _fail "--engine '$engine' is neither embedded nor sglang"
[[ -e "$out/run" ]] && _fail "$out/run exists: a run is never overwritten; remove it or give another --out"
mkdir -p "$out"
out="$(cd "$out" && pwd)"

ensure_env
[[ "$engine" != sglang ]] || ensure_sglang
started_at=$SECONDS
task=arithmetic recipe=quickstart
[[ -z "$agent" ]] || task=calculator recipe=calculator
[[ -z "$game" ]] || task=guess_number recipe=guess_number
"$VENV_PYTHON" "$ROOT/examples/$task.py" "$out/task" --seed "$seed" ${moe:+--moe} ${hybrid:+--hybrid}
"$VENV_PYTHON" -m grpo_mega.cli sft "$ROOT/examples/${recipe}_sft.yaml" \
    --set "run_dir=$out/task/sft" --set "seed=$seed" --set "model.path=$out/task/model" --set "data.train=$out/task/sft.jsonl"
"$VENV_PYTHON" -m grpo_mega.cli train "$ROOT/examples/$recipe.yaml" \
    --set "run_dir=$out/run" --set "seed=$seed" --set "layout={${layout//=/: }}" --set "rollout.engine=$engine" \
    --set "model.path=$out/task/sft/hf" --set "data.train=$out/task/train.jsonl" --set "data.heldout=$out/task/heldout.jsonl" \
    ${moe:+--set rollout.routing_replay=true} ${lora:+--set model.lora.rank=16 --set optimizer.lr=3e-3} \
    ${short:+--set steps=4 --set eval.num_prompts=64}
"$VENV_PYTHON" -m grpo_mega.cli report "$out/run"
[[ -n "$agent$game" ]] || "$VENV_PYTHON" "$ROOT/examples/answer_again.py" "$out/run"
"$VENV_PYTHON" - "$out" "$((SECONDS - started_at))" <<'PYTHON'
import json, sys
out, seconds = sys.argv[1:]
scores = [row["eval/score"] for row in map(json.loads, open(f"{out}/run/metrics.jsonl")) if "eval/score" in row]
print(f"held-out score {scores[0]:.2f} -> {scores[-1]:.2f} in {seconds} s; see {out}")
PYTHON
