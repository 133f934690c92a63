#!/usr/bin/env bash
# slurm/stage.sh SOURCE TARGET: copy a folder to this node's own disk, unless the copy exists already. TARGET appears only when
# the copy is complete. Links are followed, because a snapshot in the Hugging Face cache contains only links to files outside of it.
#
# TARGET.staged is written last. It records names, sizes, mtimes and ctimes of source and copy (no program can set back a ctime).
# If either has changed since, the folder is copied again. STAGE_CHECK=full also compares every byte. TARGET.lock keeps jobs that
# share a node from copying at the same time; the kernel releases the lock when its holder ends, even if it is killed.
set -euo pipefail
source="$1" target="$2"
record="$target.staged" partial="$target.partial"

fail() {
    echo "node ${SLURMD_NODENAME:-$(hostname)}: $1" >&2
    exit 1
}

# Print a digest of the files of a folder. $2 is the format in which find prints each file.
digest() {
    find -L "$1" -type f -printf "$2\0" | sort -z | sha256sum | cut -d ' ' -f 1
}

looks() {
    digest "$1" '%P %s %T@ %C@'
}

sizes() {
    digest "$1" '%P %s'
}

bytes_of() {
    du -sL --block-size=1 "$1" | cut -f 1
}

# Hold the lock until this script and the programs that it started have ended. If the file system has no locks, lock a file in
# /dev/shm, because only this node uses the copy.
lock() {
    local file code
    command -v flock > /dev/null || fail "flock is not there; install util-linux, in the container if there is one"
    for file in "$target.lock" "/dev/shm/grpo_mega-stage-$EUID-$(cksum <<< "$target" | cut -d ' ' -f 1)"; do
        { exec 9> "$file"; } 2> /dev/null || continue
        code=0
        flock --nonblock --conflict-exit-code 75 9 2> /dev/null || code=$?
        if ((code == 75)); then
            echo "node ${SLURMD_NODENAME:-$(hostname)}: waiting for another job that copies to $target"
            code=0
            flock 9 || code=$?
        fi
        ((code == 0)) && return
    done
    fail "neither $target.lock nor /dev/shm can be locked; set NODE_LOCAL to a folder on a disk of the node"
}

is_whole() {
    [[ -d "$target" && -f "$record" && "$(< "$record")" == "$1 $(looks "$target")" ]] || return 1
    [[ "${STAGE_CHECK:-}" != full ]] || diff --recursive --brief "$source" "$target" > /dev/null
}

broken="$(find -L "$source" -type l | head -n 1)"
[[ -z "$broken" ]] || fail "$broken is a link to a file that is not there; download the model again"
umask 077 # only this user may read the copy
mkdir -p "$(dirname "$target")"
lock
before="$(looks "$source")"
if is_whole "$before"; then
    exit 0
fi
needed="$(bytes_of "$source")"
rm -rf "$partial" "$record"
free="$(df --output=avail --block-size=1 "$(dirname "$target")" | tail -n 1)"
[[ ! -d "$target" ]] || free=$((free + $(bytes_of "$target")))
((free >= needed)) || fail "$(dirname "$target") has $free bytes free, $source takes $needed; free it"
rm -rf "$target"
cp -rL "$source" "$partial"
[[ "$(looks "$source")" == "$before" ]] || fail "$source changed while it was copied; start again once it is complete"
[[ "$(sizes "$source")" == "$(sizes "$partial")" ]] || fail "$partial is not the size of $source after the copy; look at the disk"
mv "$partial" "$target"
echo "$before $(looks "$target")" > "$record.new"
mv "$record.new" "$record"
