#!/usr/bin/env bash
# Runs the tests: tests/run.sh [--fast | --all | --sweep] [--with-system-packages] [pytest arguments]
# Makes or reuses .venv. Needs Python and pip.
#
# --fast runs the tests below that start no ranks, servers or reward workers, in 2 minutes, and installs neither SGLang nor
# Transformer Engine. Arguments that name only files and folders of that list install neither, too.
# --all adds the tests marked `full`, --sweep those marked `sweep` too (tests/conftest.py).
# --with-system-packages first installs the Debian packages of tests/debian-packages.txt. Without them some tests are skipped.
#
# Unless the arguments choose tests, they run in five processes, with a line of progress per minute (tests/helpers/parallel.py).
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../examples/env.sh"
cd "$ROOT"

FAST=(tests/{algorithm,batching,weights,planner,rewards,checks})
FAST+=(tests/{test_imports,test_config,test_config_rules,test_yaml_text,test_language}.py)

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
        for fast in "${FAST[@]}"; do
            [[ "${argument%%::*}" == "$fast" || "$argument" == "$fast/"* ]] && continue 2
        done
        return 1
    done
    ((num_paths > 0))
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
pytest=("$VENV_PYTHON" -m pytest "${arguments[@]}")
if [[ -n "$is_fast" ]]; then
    pytest+=(-m "not (distributed or sglang or waiting or pool)")
    are_fast "${arguments[@]}" && exec "${pytest[@]}"
    exec "${pytest[@]}" "${FAST[@]}" --numprocesses=2 --no-loadscope-reorder
fi
are_fast "${arguments[@]}" || {
    ensure_sglang
    ensure_te
}
[[ -z "$chooses" ]] || exec "${pytest[@]}"
exec "${pytest[@]}" --numprocesses=5 --no-loadscope-reorder
