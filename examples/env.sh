# shellcheck shell=bash
# tests/run.sh and examples/quickstart.sh source this file. `ensure_env [EXTRA ...]` makes or reuses .venv at the repository's
# root, installs the project with the named extras of pyproject.toml, and sets VENV_PYTHON. A second call installs nothing, because
# .venv/.installed stores a checksum and the extras. PYTHON is the interpreter that makes .venv, by default Python 3.11, and 3.12 with
# an NVIDIA GPU. CONSTRAINTS is the file of pinned versions; CONSTRAINTS=/dev/null installs the newest versions that pyproject.toml
# allows. GRPO_MEGA_VENV is another folder in the place of .venv.

# PyTorch threads that spin while they wait make small models ten times slower on a busy machine.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${GRPO_MEGA_VENV:-$ROOT/.venv}"
VENV_PYTHON="$VENV/bin/python"

ensure_env() {
    local stamp="$VENV/.installed"
    local checksum installed_checksum="" installed_extras=""
    [[ -d "$VENV" ]] || _make_venv
    _choose_set
    checksum="$(cat "$ROOT/pyproject.toml" "$PINS" | cksum | tr ' ' '-')"
    if [[ -x "$VENV_PYTHON" && -f "$stamp" ]]; then
        read -r installed_checksum installed_extras < "$stamp" || true
    fi
    if [[ "$installed_checksum" == "$checksum" ]] && _all_within "$installed_extras" "$@"; then
        return
    fi

    _is_supported "$VENV_PYTHON" || _fail "$(basename "$VENV") holds no working Python 3.11, 3.12 or 3.13; remove $VENV and start again"
    local extras
    extras="$(printf '%s\n' $installed_extras "$@" | sort -u | paste -sd, -)"
    echo "installing the project${extras:+ with extras $extras} into $(basename "$VENV"); the first time takes some minutes" >&2
    "${PIP_INSTALL[@]}" --editable "$ROOT${extras:+[$extras]}" ||
        _fail "pip could not install the project; see its message above"
    echo "$checksum ${extras//,/ }" > "$stamp"
}

# `ensure_sglang` installs SGLang. Call ensure_env first. On a machine with an NVIDIA GPU it runs tools/install_gpu.sh. Without a GPU
# it installs the same version without SGLang's dependencies, because most of them need CUDA, and installs requirements-cpu-SET.txt
# instead. .venv/.installed-sglang stores the checksum of that file.
ensure_sglang() {
    if _has_gpu; then
        grep -qw gpu "$VENV/.installed" || "$ROOT/tools/install_gpu.sh"
        return
    fi
    local list="$ROOT/grpo_mega/rollout/sglang/requirements-cpu-$VERSION_SET.txt" stamp="$VENV/.installed-sglang"
    local version wanted
    version="$(_pin sglang)"
    wanted="$version $(cksum < "$list")"
    [[ -f "$stamp" && "$(< "$stamp")" == "$wanted" ]] && return
    echo "installing $version for the CPU into $(basename "$VENV"), 2 GB; the first time takes some minutes" >&2
    # In this order pip does not complain about missing dependencies.
    "${PIP_INSTALL[@]}" --no-warn-conflicts --requirement "$list" &&
        "${PIP_INSTALL[@]}" --no-deps "$version" ||
        _fail "pip could not install SGLang; see its message above"
    echo "$wanted" > "$stamp"
}

# `ensure_te` installs the wheel of each Transformer Engine version of the set, without dependencies, into .venv-te/VERSION. Call
# ensure_env first. Only the tests that run its Python code on emulated kernels import it. They are skipped if the install fails.
ensure_te() {
    local version folder
    for version in $(te_versions); do
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

# Print the Transformer Engine versions that the tests of the set run, the default first.
te_versions() {
    sed -n "s/^$VERSION_SET //p" "$ROOT/tests/transformer-engine.txt"
}

# Set VERSION_SET, the set of package versions (grpo_mega/distributed/versions.py) for .venv's Python; PINS, its file; and PIP_INSTALL.
_choose_set() {
    local python="$VENV_PYTHON"
    [[ -x "$python" ]] || python="${PYTHON:-$(_find_python || true)}" # the Python that would make .venv
    VERSION_SET=one
    [[ ! "$(_version_of "$python")" =~ ^3\.1[23]$ ]] || VERSION_SET=two
    PINS="${CONSTRAINTS:-$ROOT/tools/constraints-$VERSION_SET.txt}"
    PIP_INSTALL=("$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --constraint "$PINS")
}

# _pin PACKAGE: print PACKAGE==VERSION of the set, from pyproject.toml.
_pin() {
    local when="< '3.12'" line
    [[ "$VERSION_SET" == one ]] || when=">= '3.12'"
    line="$(grep -om1 "$1==[0-9.]*[0-9]; python_version $when" "$ROOT/pyproject.toml")" || _fail "pyproject.toml pins no $1"
    echo "${line%%;*}"
}

_make_venv() {
    local python="${PYTHON:-}"
    [[ -n "$python" ]] || python="$(_find_python)" || _fail "needs Python 3.11, 3.12 or 3.13, found none; set PYTHON to one"
    _is_supported "$python" || _fail "PYTHON=$python: must be Python 3.11, 3.12 or 3.13, which SGLang has wheels for; set PYTHON to one"
    _has_gpu || [[ "$(_version_of "$python")" == 3.11 ]] ||
        echo "downloading 3 GB, because torch for Python $(_version_of "$python") comes with CUDA; Python 3.11 needs less" >&2
    if ! "$python" -m venv "$VENV"; then
        rm -rf "$VENV"
        _fail "$python cannot make a virtual environment; install its venv module (on Debian: apt-get install python3-venv)"
    fi
}

# Print an interpreter on the path: with a GPU preferably of Python 3.12, otherwise of 3.11, whose packages are smaller.
_find_python() {
    local version candidate order=(3.11 3.12 3.13)
    ! _has_gpu || order=(3.12 3.13 3.11)
    for version in "${order[@]}"; do
        for candidate in "python$version" python3; do
            if [[ "$(_version_of "$candidate")" == "$version" ]]; then
                echo "$candidate"
                return
            fi
        done
    done
    return 1
}

_is_supported() {
    [[ "$(_version_of "$1")" =~ ^3\.1[123]$ ]]
}

# _version_of PYTHON: print its version as 3.11; print nothing if it does not start.
_version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true
}

# Return 0 on a machine with an NVIDIA GPU, or if IS_FOR_GPU is set, because an image is built on a machine without one.
_has_gpu() {
    [[ -n "${IS_FOR_GPU:-}" ]] || nvidia-smi > /dev/null 2>&1
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
