#!/usr/bin/env bash
# Runs the tests: tests/run.sh [--with-system-packages] [--all] [pytest arguments]. Makes or reuses .venv; needs Python and pip.
# --all adds the cases marked `full` (tests/conftest.py). Unless the arguments choose tests, three processes share the machine: tests
# that start ranks or servers, tests that mostly wait and resumed runs (`waiting`), all others. The first prints as it runs.
# --with-system-packages first installs the Debian packages of tests/debian-packages.txt, without which some tests are skipped.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../examples/env.sh"

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

arguments=()
for argument in "$@"; do
    if [[ "$argument" == --with-system-packages ]]; then
        install_system_packages
    else
        arguments+=("$argument")
    fi
done

ensure_env dev
ensure_sglang
ensure_te 2.11.0 2.10.0 2.9.0
cd "$ROOT"

for argument in "${arguments[@]}"; do
    case "$argument" in
        --all | --durations=* | -q | -v | -vv) ;;
        *) exec "$VENV_PYTHON" -m pytest "${arguments[@]}" ;;
    esac
done

starting="distributed or sglang"
logs="$(mktemp -d)"
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$logs"' EXIT
"$VENV_PYTHON" -m pytest "${arguments[@]}" -m "not ($starting or waiting)" > "$logs/others" 2>&1 &
others=$!
"$VENV_PYTHON" -m pytest "${arguments[@]}" -m waiting > "$logs/waiting" 2>&1 &
waiting=$!
status=0
"$VENV_PYTHON" -m pytest "${arguments[@]}" -m "($starting) and not waiting" || status=$?
wait "$waiting" || status=$?
wait "$others" || status=$?
cat "$logs/waiting" "$logs/others"
exit "$status"
