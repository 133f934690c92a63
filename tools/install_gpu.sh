#!/usr/bin/env bash
# tools/install_gpu.sh [--dry-run]: install the project for NVIDIA GPUs into .venv: torch, Transformer Engine, SGLang's kernels.
#
# torch must come first, because Transformer Engine's extension is compiled against the installed torch. Otherwise pip compiles it
# in an isolated environment against the newest torch, and the extension does not load. Needs nvcc and a C++ compiler. If NVIDIA
# has no wheel for this torch, the compilation takes about ten minutes. --dry-run prints the commands. nvcc and driver are checked
# before anything is downloaded.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../examples/env.sh"

CUDA=13    # version of torch's default build and of SGLang's kernels
DRIVER=580 # oldest driver for it
GLIBC=2.34 # oldest glibc for SGLang's wheels (manylinux_2_34)
declare -A TRANSFORMER_ENGINE=([one]=">=2.9,<2.12" [two]=">=2.16.1,<2.21") # by set, as in grpo_mega/distributed/versions.py
IS_FOR_GPU=1
BUILD_TOOLS=(setuptools wheel packaging ninja pybind11)

run() {
    if [[ -n "$IS_DRY" ]]; then
        echo "$*"
    else
        "$@"
    fi
}

# Refuse a toolkit or a driver of another CUDA version. The compiled extension would load, but fail or be wrong at run time.
check_machine() {
    local nvcc release driver glibc
    glibc="$(getconf GNU_LIBC_VERSION 2> /dev/null | grep -oP '[0-9.]+$' || echo unknown)"
    [[ "$(printf '%s\n' "$GLIBC" "$glibc" | sort -V | head -n 1)" == "$GLIBC" ]] ||
        _fail "glibc $glibc: must be $GLIBC or later for SGLang's wheels; use a container or a newer system (Ubuntu 22.04, RHEL 9)"
    nvcc="$(PATH="${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin" command -v nvcc)" ||
        _fail "nvcc is not there; install the CUDA toolkit $CUDA, or set CUDA_HOME to its folder"
    release="$("$nvcc" --version | grep -oP 'release \K[0-9.]+')" || _fail "$nvcc --version names no release"
    [[ "$release" == "$CUDA".* ]] ||
        _fail "$nvcc is of CUDA $release: must be of CUDA $CUDA; load that module, or set CUDA_HOME to the toolkit's folder"
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)" || return 0 # an image's build
    ((${driver%%.*} >= DRIVER)) || _fail "driver $driver: must be $DRIVER or later for CUDA $CUDA; update the driver"
}

# Print the folders with the headers of pip's cuDNN and NCCL. Transformer Engine's build looks for them in the toolkit only, and a
# toolkit has no cuDNN.
header_folders() {
    local site folder package
    site="$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    for package in cudnn nccl; do
        folder="$site/nvidia/$package/include"
        [[ -f "$folder/$package.h" ]] || _fail "$folder/$package.h is not there; it comes with torch: remove $VENV and start again"
        printf '%s:' "$folder"
    done
}

IS_DRY=""
case "${1:-}" in
    "") ;;
    --dry-run) IS_DRY=1 ;;
    *) _fail "$1 is not known; the only option is --dry-run" ;;
esac
if [[ -z "$IS_DRY" ]]; then
    check_machine
    [[ -d "$VENV" ]] || _make_venv
fi
pip=("$VENV_PYTHON" -m pip install --disable-pip-version-check)
_choose_set

run "${pip[@]}" "$(_pin torch)" "${BUILD_TOOLS[@]}"
if [[ -z "$IS_DRY" ]]; then
    found="$("$VENV_PYTHON" -c 'import torch; print(torch.version.cuda)')"
    [[ "$found" == "$CUDA".* ]] || _fail "the installed torch has CUDA $found and not $CUDA; remove $VENV and start again"
    headers="$(header_folders)"
fi
CPATH="${headers:-}${CPATH:-}" NVTE_FRAMEWORK=pytorch run "${pip[@]}" --no-build-isolation "transformer-engine[core_cu$CUDA,pytorch]${TRANSFORMER_ENGINE[$VERSION_SET]}"
run ensure_env gpu
if nvidia-smi > /dev/null 2>&1; then # skip while a container image is built, because the build has no GPU
    run "$VENV_PYTHON" -c "import transformer_engine.pytorch, megatron.core, sglang; print('installed')"
    run "$VENV_PYTHON" "$ROOT/tools/check_node.py" --expect-gpus "$(nvidia-smi --list-gpus | wc -l)" --nvcc
fi
