#!/usr/bin/env bash
# Runs the tests: tests/run.sh [--with-system-packages] [pytest arguments]. Makes or reuses .venv; needs Python and pip alone.
# --with-system-packages first installs the Debian packages of tests/debian-packages.txt, which some tests need.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../examples/env.sh"

install_system_packages() {
    local list="$ROOT/tests/debian-packages.txt" packages
    [[ -f "$list" ]] || return 0
    packages="$(sed 's/#.*//' "$list" | xargs)"
    [[ -n "$packages" ]] || return 0
    local as_root=()
    [[ "$(id -u)" == 0 ]] || as_root=(sudo)
    echo "installing Debian packages: $packages" >&2
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet $packages > /dev/null
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
cd "$ROOT"
exec "$VENV_PYTHON" -m pytest "${arguments[@]}"
