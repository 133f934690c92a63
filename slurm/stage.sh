#!/usr/bin/env bash
# slurm/stage.sh SOURCE TARGET: copies a folder to this node's own disk, unless it is there already. Whole or not at all.
set -euo pipefail
source="$1" target="$2"

size_of() {
    find "$1" -type f -printf '%P %s\n' | sort | cksum
}

if [[ -d "$target" && "$(size_of "$source")" == "$(size_of "$target")" ]]; then
    exit 0
fi
needed="$(du -s --block-size=1 "$source" | cut -f 1)"
mkdir -p "$(dirname "$target")"
free="$(df --output=avail --block-size=1 "$(dirname "$target")" | tail -n 1)"
if ((free < needed)); then
    echo "node ${SLURMD_NODENAME:-$(hostname)}: $(dirname "$target") has $free bytes free, $source takes $needed; free it" >&2
    exit 1
fi
rm -rf "$target" "$target.partial"
cp -r "$source" "$target.partial"
mv "$target.partial" "$target"
