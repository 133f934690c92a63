# shellcheck shell=bash
# tests/run.sh and examples/quickstart.sh source this file. `ensure_env [EXTRA ...]` makes or reuses .venv at the repository's
# root, installs the project with the named extras of pyproject.toml, and sets VENV_PYTHON. A second call installs nothing, because
# .venv/.installed stores a checksum and the extras. PYTHON is the interpreter that makes .venv. CONSTRAINTS is the file of
# pinned versions; CONSTRAINTS=/dev/null installs the newest versions that pyproject.toml allows.

# PyTorch threads that spin while they wait make small models ten times slower on a busy machine.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_PYTHON="$ROOT/.venv/bin/python"
PIP_INSTALL=("$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --constraint "${CONSTRAINTS:-$ROOT/tools/constraints.txt}")

ensure_env() {
    local stamp="$ROOT/.venv/.installed"
    local checksum installed_checksum="" installed_extras=""
    checksum="$(cat "$ROOT/pyproject.toml" "${CONSTRAINTS:-$ROOT/tools/constraints.txt}" | cksum | tr ' ' '-')"
    if [[ -x "$VENV_PYTHON" && -f "$stamp" ]]; then
        read -r installed_checksum installed_extras < "$stamp" || true
    fi
    if [[ "$installed_checksum" == "$checksum" ]] && _all_within "$installed_extras" "$@"; then
        return
    fi

    [[ -d "$ROOT/.venv" ]] || _make_venv
    _is_supported "$VENV_PYTHON" || _fail ".venv holds no working Python 3.11, 3.12 or 3.13; remove $ROOT/.venv and start again"
    local extras
    extras="$(printf '%s\n' $installed_extras "$@" | sort -u | paste -sd, -)"
    echo "installing the project${extras:+ with extras $extras} into .venv; the first time takes some minutes" >&2
    "${PIP_INSTALL[@]}" --editable "$ROOT${extras:+[$extras]}" ||
        _fail "pip could not install the project; see its message above"
    echo "$checksum ${extras//,/ }" > "$stamp"
}

# `ensure_sglang` installs SGLang. Call ensure_env first. On a machine with an NVIDIA GPU it runs tools/install_gpu.sh. Without a GPU
# it installs the same version without SGLang's dependencies, because most of them need CUDA, and installs requirements-cpu.txt
# instead. .venv/.installed-sglang stores the checksum of that file.
ensure_sglang() {
    if nvidia-smi > /dev/null 2>&1; then
        grep -qw gpu "$ROOT/.venv/.installed" || "$ROOT/tools/install_gpu.sh"
        return
    fi
    local list="$ROOT/grpo_mega/rollout/sglang/requirements-cpu.txt" stamp="$ROOT/.venv/.installed-sglang"
    local version wanted
    version="$(grep -om1 'sglang==[0-9.]*[0-9]' "$ROOT/pyproject.toml")"
    wanted="$version $(cksum < "$list")"
    [[ -f "$stamp" && "$(< "$stamp")" == "$wanted" ]] && return
    echo "installing $version for the CPU into .venv, 2 GB; the first time takes some minutes" >&2
    # In this order pip does not complain about missing dependencies.
    "${PIP_INSTALL[@]}" --no-warn-conflicts --requirement "$list" &&
        "${PIP_INSTALL[@]}" --no-deps "$version" ||
        _fail "pip could not install SGLang; see its message above"
    echo "$wanted" > "$stamp"
}

# `ensure_te VERSION ...` installs the wheel of each Transformer Engine version, without dependencies, into .venv-te/VERSION. Call
# ensure_env first. Only the tests that run its Python code on emulated kernels import it. They are skipped if the install fails.
ensure_te() {
    local version folder
    for version in "$@"; do
        folder="$ROOT/.venv-te/$version"
        [[ -f "$folder/.installed" ]] && continue
        rm -rf "$folder"
        if "${PIP_INSTALL[@]}" --no-deps --target "$folder" "transformer-engine==$version"; then
            touch "$folder/.installed"
        else
            echo "cannot install transformer-engine $version into .venv-te; the tests that need it are skipped" >&2
        fi
    done
}

_make_venv() {
    local python="${PYTHON:-}" candidate
    if [[ -z "$python" ]]; then
        for candidate in python3 python3.13 python3.12 python3.11; do
            if _is_supported "$candidate"; then
                python="$candidate"
                break
            fi
        done
        [[ -n "$python" ]] || _fail "needs Python 3.11, 3.12 or 3.13, found none; set PYTHON to one"
    fi
    _is_supported "$python" || _fail "PYTHON=$python: must be Python 3.11, 3.12 or 3.13, which SGLang has wheels for; set PYTHON to one"
    if ! "$python" -m venv "$ROOT/.venv"; then
        rm -rf "$ROOT/.venv"
        _fail "$python cannot make a virtual environment; install its venv module (on Debian: apt-get install python3-venv)"
    fi
}

_is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null
}

# _all_within WORDS WORD ...: succeed if every WORD is one of the words in WORDS.
_all_within() {
    local words=" $1 " word
    shift
    for word in "$@"; do
        [[ "$words" == *" $word "* ]] || return 1
    done
}

# Print the comment at the head of the script that sources this file.
_print_head() {
    sed -n '2,/^[^#]/{ s/^# \{0,1\}//p; }' "$0"
}

_fail() {
    echo "$(basename "$0"): error: $*" >&2
    exit 1
}

case " $* " in
    *" --help "*)
        _print_head
        exit 0
        ;;
esac
