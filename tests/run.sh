#!/usr/bin/env bash
# Runs the tests: tests/run.sh [--fast | --all | --sweep] [--with-system-packages] [pytest arguments]
# Makes or reuses .venv. Needs Python and pip.
#
# --fast runs the tests below that start no ranks, servers or reward workers, in 2 minutes, and installs neither SGLang nor
# Transformer Engine. Arguments that name only files and folders of that list install neither, too.
# --all adds the tests marked `full`, --sweep those marked `sweep` too (tests/conftest.py).
# --with-system-packages first installs the Debian packages of tests/debian-packages.txt. Without them some tests are skipped.
#
# Unless the arguments choose tests, five processes share the machine: tests that start SGLang's servers or wait for pools, tests
# that start ranks or runs in two parts, and all others in two parts. A line per minute reports the progress of each.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../examples/env.sh"
cd "$ROOT"

FAST_MODEL=(tests/algorithm tests/batching tests/weights tests/planner tests/test_imports.py)
FAST_RULES=(tests/rewards tests/preflight tests/test_config.py tests/test_yaml_text.py tests/test_language.py)
NO_TESTS=5 # pytest's exit code if it ran no test
SLOW="distributed or sglang or waiting or pool"

install_system_packages() {
    local list="$ROOT/tests/debian-packages.txt" packages as_root=()
    packages="$(sed 's/#.*//' "$list" | xargs)"
    # shellcheck disable=SC2086
    dpkg --status $packages > /dev/null 2>&1 && return
    [[ "$(id -u)" == 0 ]] || as_root=(sudo --non-interactive)
    echo "installing Debian packages: $packages" >&2
    # shellcheck disable=SC2086
    "${as_root[@]}" apt-get update --quiet > /dev/null 2>&1 &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet $packages > /dev/null 2>&1 ||
        echo "cannot install $packages (no root, no network, or not Debian); the tests that need them are skipped" >&2
}

# Return 0 if the arguments name tests, and --fast covers all of them.
are_fast() {
    local argument fast num_paths=0
    for argument in "$@"; do
        [[ -e "${argument%%::*}" ]] || continue
        num_paths=$((num_paths + 1))
        for fast in "${FAST_MODEL[@]}" "${FAST_RULES[@]}"; do
            [[ "${argument%%::*}" == "$fast" || "$argument" == "$fast/"* ]] && continue 2
        done
        return 1
    done
    ((num_paths > 0))
}

report_progress() {
    local minutes=0 name
    while sleep 60 > /dev/null 2>&1; do # without the output, which a reader waits for
        minutes=$((minutes + 1))
        printf '%s min' "$minutes"
        for name in "${PARTS[@]}"; do
            printf ' | %s %s' "$name" "$(cat "$logs/$name.progress" 2> /dev/null || echo starting)"
        done
        echo
    done
}

arguments=()
is_fast=""
chooses=""
for argument in "$@"; do
    case "$argument" in
        --with-system-packages) install_system_packages ;;
        --fast) is_fast=1 ;;
        *)
            arguments+=("$argument")
            [[ "$argument" =~ ^(--all|--sweep|--durations=.*|-q|-v|-vv)$ ]] || chooses=1
            ;;
    esac
done

ensure_env dev
if [[ -n "$is_fast" ]]; then
    fast=("$VENV_PYTHON" -m pytest "${arguments[@]}" -m "not ($SLOW)")
    are_fast "${arguments[@]}" && exec "${fast[@]}"
    other="$(mktemp)" # the output of the second process
    trap 'kill $(jobs -p) 2> /dev/null || true; rm -f "$other"' EXIT
    "${fast[@]}" "${FAST_RULES[@]}" > "$other" 2>&1 &
    model=0
    "${fast[@]}" "${FAST_MODEL[@]}" || model=$?
    rules=0
    wait $! || rules=$?
    cat "$other"
    ((model == NO_TESTS)) && exit "$rules" # -k may choose tests of one process only
    ((rules == NO_TESTS)) && exit "$model"
    exit $((model ? model : rules))
fi
are_fast "${arguments[@]}" || {
    ensure_sglang
    ensure_te 2.11.0 2.10.0 2.9.0
}
[[ -z "$chooses" ]] || exec "$VENV_PYTHON" -m pytest "${arguments[@]}"

PARTS=(servers ranks runs first second)
FIRST=(tests/{algorithm,batching,benchmarks,commands,data,distributed,formats,megatron}) # about half of the time
SERVERS="sglang or (pool and waiting)"
declare -A expressions=(
    [servers]="$SERVERS"
    [ranks]="(distributed or waiting) and not ($SERVERS)"
    [runs]="(distributed or waiting) and not ($SERVERS)"
    [first]="not (distributed or waiting or sglang)"
    [second]="not (distributed or waiting or sglang)"
)
rest="tests ${FIRST[*]/#/--ignore=}"
declare -A paths=([servers]=tests [ranks]="${FIRST[*]}" [runs]="$rest" [first]="${FIRST[*]}" [second]="$rest")
logs="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$logs"' EXIT
declare -A processes
for name in "${PARTS[@]}"; do
    # shellcheck disable=SC2086
    PROGRESS_FILE="$logs/$name.progress" "$VENV_PYTHON" -m pytest ${paths[$name]} "${arguments[@]}" \
        -m "${expressions[$name]}" > "$logs/$name" 2>&1 &
    processes[$name]=$!
done
report_progress &
status=0
for name in "${PARTS[@]}"; do
    wait "${processes[$name]}" || status=$?
done
cat "${PARTS[@]/#/$logs/}"
exit "$status"
