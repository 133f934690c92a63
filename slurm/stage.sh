#!/usr/bin/env bash
# slurm/stage.sh SOURCE TARGET: copies a folder to this node's own disk, unless it is there already. Whole or not at all.
# Links are followed: a snapshot in the cache of the Hugging Face hub holds nothing but links to files outside of it.
set -euo pipefail
source="$1" target="$2"

size_of() {
    find -L "$1" -type f -printf '%P %s\n' | sort | cksum
}

broken="$(find -L "$source" -type l | head -n 1)"
if [[ -n "$broken" ]]; then
    echo "node ${SLURMD_NODENAME:-$(hostname)}: $broken is a link to a file that is not there; download the model again" >&2
    exit 1
fi
if [[ -d "$target" && "$(size_of "$source")" == "$(size_of "$target")" ]]; then
    exit 0
fi
needed="$(du -sL --block-size=1 "$source" | cut -f 1)"
umask 077 # the copy is of this user alone
mkdir -p "$(dirname "$target")"
free="$(df --output=avail --block-size=1 "$(dirname "$target")" | tail -n 1)"
if ((free < needed)); then
    echo "node ${SLURMD_NODENAME:-$(hostname)}: $(dirname "$target") has $free bytes free, $source takes $needed; free it" >&2
    exit 1
fi
rm -rf "$target" "$target.partial"
cp -rL "$source" "$target.partial"
mv "$target.partial" "$target"
