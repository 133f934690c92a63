#!/usr/bin/env bash
# tools/install_gpu.sh [--dry-run]: install the project for NVIDIA GPUs into .venv: torch, Transformer Engine, SGLang's kernels.
#
# torch must come first, because Transformer Engine's extension is compiled against the installed torch. Otherwise pip compiles it
# in an isolated environment against the newest torch, and the extension does not load. Needs nvcc and a C++ compiler. If NVIDIA
# has no wheel for this torch, the compilation takes about ten minutes. --dry-run prints the commands.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../examples/env.sh"

CUDA=13 # version of torch's default build and of SGLang's kernels
TRANSFORMER_ENGINE=">=2.9,<2.12" # versions that megatron-core supports
BUILD_TOOLS=(setuptools wheel packaging ninja pybind11)

run() {
    if [[ -n "$IS_DRY" ]]; then
        echo "$*"
    else
        "$@"
    fi
}

IS_DRY=""
case "${1:-}" in
    "") ;;
    --dry-run) IS_DRY=1 ;;
    *) _fail "$1 is not known; the only option is --dry-run" ;;
esac
if [[ -z "$IS_DRY" ]]; then
    "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version > /dev/null 2>&1 || nvcc --version > /dev/null 2>&1 ||
        _fail "nvcc is not there; install the CUDA toolkit $CUDA, or set CUDA_HOME to its folder"
    [[ -d "$ROOT/.venv" ]] || _make_venv
fi
pip=("$VENV_PYTHON" -m pip install --disable-pip-version-check)
torch="$(grep -om1 'torch==[0-9.]*[0-9]' "$ROOT/pyproject.toml")"

run "${pip[@]}" "$torch" "${BUILD_TOOLS[@]}"
if [[ -z "$IS_DRY" ]]; then
    found="$("$VENV_PYTHON" -c 'import torch; print(torch.version.cuda)')"
    [[ "$found" == "$CUDA".* ]] || _fail "the installed torch has CUDA $found and not $CUDA; remove $ROOT/.venv and start again"
fi
NVTE_FRAMEWORK=pytorch run "${pip[@]}" --no-build-isolation "transformer-engine[core_cu$CUDA,pytorch]$TRANSFORMER_ENGINE"
run ensure_env gpu
if nvidia-smi > /dev/null 2>&1; then # skip while a container image is built, because the build has no GPU
    run "$VENV_PYTHON" -c "import transformer_engine.pytorch, megatron.core, sglang; print('installed')"
    run "$VENV_PYTHON" "$ROOT/tools/check_node.py" --expect-gpus "$(nvidia-smi --list-gpus | wc -l)" --nvcc
fi
