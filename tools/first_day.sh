#!/usr/bin/env bash
# tools/first_day.sh MODEL [--data DATA] [--out FOLDER] [--without te,sglang]: test a machine with new GPUs, in about an hour.
# tools/first_day.sh --cpu [--out FOLDER]: try this script at tiny sizes on emulated kernels, in minutes; its figures mean nothing.
#
# The script checks the installation and the links, and runs first what everything else needs: memory and whole steps. It takes a
# step with deterministic kernels twice and compares the bits, trains MODEL for 20 steps in FP8 with SGLang on the same GPUs, measures
# tools/benchmarks/gpu, and runs the remaining tests. FP8 rollouts are last. MODEL is the folder of an instruct model of 0.5B to 2B parameters. FOLDER/report.md lists every
# figure with its target; attach the folder to an issue. If a step fails, the others still run, and the exit code is 1.
# --without te leaves out Transformer Engine, so it trains in bf16; --without sglang generates with the embedded engine. The tests and
# benchmarks that need them are skipped. Both together need only torch, Megatron-core and the rest of the extra `dev`.
set -uo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../examples/env.sh"
cd "$ROOT" || exit

usage="usage: tools/first_day.sh MODEL [--data DATA] [--out FOLDER] [--without te,sglang], or tools/first_day.sh --cpu [--out FOLDER]"
MODEL="" DATA="hub:openai/gsm8k:main@train" OUT="" IS_CPU="" WITHOUT=""
while (($#)); do
    case "$1" in
        --cpu) IS_CPU=1 ;;
        --data | --out | --without)
            (($# > 1)) || _fail "$1 needs a value; $usage"
            case "$1" in
                --data) DATA="$2" ;;
                --out) OUT="$2" ;;
                --without) WITHOUT="$2" ;;
            esac
            shift
            ;;
        -*) _fail "$1 is not known; $usage" ;;
        *) MODEL="$1" ;;
    esac
    shift
done
[[ "$WITHOUT" =~ ^(te|sglang|te,sglang|sglang,te|)$ ]] || _fail "--without $WITHOUT: must be te, sglang, or te,sglang"
[[ -z "$WITHOUT" || -z "$IS_CPU" ]] || _fail "--cpu runs everything on emulated kernels; leave --without out"
OUT="${OUT:-runs/first_day-$(date +%Y%m%d-%H%M%S)}"
[[ ! -e "$OUT" ]] || _fail "--out $OUT is there already; name another folder"
if [[ -n "$IS_CPU" ]]; then
    [[ -z "$MODEL" ]] || _fail "--cpu makes its own model; leave $MODEL out"
    ensure_env dev
    ensure_sglang
    ensure_te
else
    num_gpus="$(nvidia-smi --list-gpus 2> /dev/null | wc -l)"
    ((num_gpus > 0)) || _fail "nvidia-smi shows no GPU; use a machine with one, or --cpu to try the script"
    [[ -f "$MODEL/config.json" ]] || _fail "MODEL=$MODEL must be a folder with a config.json; $usage"
    if [[ "$WITHOUT" == *te* && "$WITHOUT" == *sglang* ]]; then
        ensure_env dev
    else
        grep -qsw gpu "$VENV/.installed" || _fail "the environment for GPUs is not there; run tools/install_gpu.sh first"
        ensure_env gpu dev
    fi
fi
mkdir -p "$OUT"

# step NAME COMMAND ...: run one part. Write its output to OUT/NAME.log, and its exit code and time to OUT/steps.jsonl.
step() {
    local name="$1" code=0 started_at=$SECONDS
    shift
    echo "== $name: see $OUT/$name.log"
    "$@" > "$OUT/$name.log" 2>&1 || code=$?
    ((code == 0)) || echo "   failed with code $code: $(tail -n 1 "$OUT/$name.log")"
    echo "{\"name\": \"$name\", \"code\": $code, \"seconds\": $((SECONDS - started_at))}" >> "$OUT/steps.jsonl"
}

settings=(--set "run_dir=$OUT/run")
if [[ "$WITHOUT" == *sglang* ]]; then settings+=(--set rollout.engine=embedded); else settings+=(--set rollout.engine=sglang); fi
[[ "$WITHOUT" == *te* ]] || settings+=(--set precision.fp8=hybrid --set precision.fp8_recipe=tensorwise)
python=("$VENV_PYTHON")
if [[ -n "$IS_CPU" ]]; then
    export PYTHONPATH="$ROOT" OMP_NUM_THREADS=1
    read -r default _ <<< "$(te_versions)"
    emulated=("${python[@]}" -m tests.te_on_cpu.emulated_te.run "$default")
    settings+=(--set "model.path=$OUT/model" --set model.dtype=bfloat16 --set layout.tp=1 --set layout.pp=1 --set steps=4)
    settings+=(--set rollout.cache_tokens=4096 --set eval.interval=2 --set rollout.mismatch_stop=null)
    step install "${python[@]}" tools/check_node.py
    step tests "${python[@]}" -m pytest -q -p tests.te_on_cpu.emulated_te.plugin -p no:cacheprovider tests/gpu/test_logits.py
    step benchmarks "${python[@]}" tools/benchmarks/gpu --tiny
    "${python[@]}" examples/tiny_random_model.py "$OUT/model" > /dev/null
    step plan "${python[@]}" -m grpo_mega.cli plan slurm/tiny.yaml --json "${settings[@]}"
    step train "${emulated[@]}" grpo_mega.cli train slurm/tiny.yaml "${settings[@]}"
else
    tp=$((num_gpus % 2 ? 1 : 2))
    settings+=(--set "model.path=$MODEL" --set "data.train=$DATA" --set data.heldout=null --set data.heldout_size=128)
    settings+=(--set "layout.tp=$tp" --set "layout.dp=$((num_gpus / tp))" --set "layout.sequence_parallel=$([[ $tp == 1 ]] && echo false || echo true)")
    settings+=(--set steps=20 --set eval.interval=10 --set checkpoint.interval=10)
    check=("${python[@]}" tools/check_node.py --expect-gpus "$num_gpus")
    [[ "$WITHOUT" == *sglang* ]] || check+=(--nvcc) # SGLang compiles kernels
    step install "${check[@]}"
    if ((num_gpus > 1)); then
        step allreduce env SLURM_NNODES=1 SLURM_NODEID=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 \
            "${python[@]}" tools/check_allreduce.py --ranks "$num_gpus" --node-floor 200 --out "$OUT/slow_nodes"
    fi
    # Memory and whole steps come first: without them no run on the card can be right.
    tests=("${python[@]}" -m pytest -q -p no:cacheprovider)
    step memory "${tests[@]}" tests/gpu/test_memory.py tests/gpu/test_offload.py tests/gpu/test_server.py
    step whole_steps "${tests[@]}" tests/gpu/test_whole_steps.py
    for number in 1 2; do
        step "deterministic$number" env DETERMINISTIC=1 "${python[@]}" -m grpo_mega.cli train examples/qwen2.5-1.5b.yaml "${settings[@]}" \
            --set "run_dir=$OUT/deterministic$number" --set rollout.engine=embedded --set steps=1 --set eval.interval=0 --set checkpoint.interval=0
    done
    step same_bits "${python[@]}" tools/first_day_report.py --same "$OUT/deterministic1" "$OUT/deterministic2"
    step plan "${python[@]}" -m grpo_mega.cli plan examples/qwen2.5-1.5b.yaml --json "${settings[@]}"
    step train "${python[@]}" -m grpo_mega.cli train examples/qwen2.5-1.5b.yaml "${settings[@]}"
    step benchmarks "${python[@]}" tools/benchmarks/gpu --quick
    step tests "${tests[@]}" tests/gpu --ignore=tests/gpu/test_memory.py --ignore=tests/gpu/test_offload.py \
        --ignore=tests/gpu/test_server.py --ignore=tests/gpu/test_whole_steps.py
    if [[ "$WITHOUT" != *sglang* ]]; then # last, because DeepGEMM compiles for many minutes unless its cache is warm
        step fp8_rollouts "${python[@]}" -m grpo_mega.cli train examples/qwen2.5-1.5b.yaml "${settings[@]}" \
            --set "run_dir=$OUT/fp8_rollouts" --set rollout.quantization=fp8 --set steps=3 --set eval.interval=0 --set checkpoint.interval=0
    fi
fi
step html "${python[@]}" -m grpo_mega.cli report "$OUT/run"
exec "${python[@]}" tools/first_day_report.py "$OUT"
