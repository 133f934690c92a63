#!/usr/bin/env bash
# A job on several nodes. train_70b.sh and train_tiny.sh set CONFIG and RANKS_PER_NODE and source this script.
#
# The job trains until RUN_DIR/hf exists, over as many starts of one Slurm job as it needs. Before the time limit it asks the run
# to save and stop, and requeues itself. After a failure it names node and rank, and requeues itself if the last start saved
# something. It runs on the first node, outside of any container; slurm/node.py runs on every node. See slurm/README.md.

set -uo pipefail

# shellcheck source=slurm/before.sh
source "$GRPO_MEGA_ROOT/slurm/before.sh"

EXIT_CONFIG=2              # grpo-mega's exit code for an error that the user must fix; another start would fail in the same way
MAX_STARTS_WITHOUT_SAVE=2  # the job gives up after this many in a row
SECONDS_TO_REPORT=10       # time for other ranks to report failures after the first one, before all nodes are killed
SECONDS_TO_ANSWER=10       # timeout for a node that is asked whether it is alive
TRIES_TO_REQUEUE=5         # 5 seconds apart

main() {
    require_arguments "$@"
    settings "$@"
    if is_finished; then
        say "the run in $RUN_DIR is finished: $RUN_DIR/hf"
        exit 0
    fi
    trap on_usr1 USR1
    trap on_term TERM
    prepare
    start_timer
    say "start $((RESTARTS + 1)): $NUM_NODES nodes ($SLURM_JOB_NODELIST) of $RANKS_PER_NODE ranks, rendezvous at" \
        "$MASTER_ADDR:$MASTER_PORT, run_dir=$RUN_DIR"
    check_nodes
    stage_model
    train
    judge
}

say() {
    echo "$(date '+%F %T') $SLURM_JOB_NAME $SLURM_JOB_ID: $*"
}

# --- Arguments and settings -------------------------------------------------------------------------------------------

require_arguments() {
    if (($# < 2)) || [[ "$1" == -* || "$2" == -* ]]; then
        echo "usage: sbatch slurm/${SLURM_JOB_NAME:-train_70b}.sh MODEL DATA [--set key=value ...]" >&2
        exit "$EXIT_CONFIG"
    fi
    if [[ -z "${SLURM_JOB_ID:-}" ]]; then
        echo "error: this is no Slurm job; start it by sbatch, or train on one machine by grpo-mega train CONFIG" >&2
        exit "$EXIT_CONFIG"
    fi
}

settings() {
    keep_own_variables
    ROOT="$GRPO_MEGA_ROOT"
    cd "$ROOT" || exit "$EXIT_CONFIG"
    MODEL="$1" DATA="$2"
    shift 2
    OVERRIDES=("$@")
    [[ -e "$DATA" ]] && DATA="$(realpath "$DATA")"
    [[ -e "$MODEL" ]] && MODEL="$(realpath "$MODEL")"

    # A requeued job keeps its id, so all its starts use the same folder.
    RUN_DIR="$(realpath -m "${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}")"
    STATE="$RUN_DIR/logs/slurm"
    check_mounts
    if [[ -z "${PYTHON:-}" ]]; then # a container has its own Python
        PYTHON=python3
        [[ -n "${CONTAINER:-}" || ! -x "$ROOT/.venv/bin/python" ]] || PYTHON="$ROOT/.venv/bin/python"
    fi
    GPUS_PER_NODE="${GPUS_PER_NODE:-$RANKS_PER_NODE}"
    NUM_NODES="$SLURM_JOB_NUM_NODES"
    mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

    # The rendezvous is at the first node's address on NETWORK_INTERFACE if that is set, and otherwise at the address that Slurm
    # uses, because a node's name may not resolve on other nodes. The port is free on the first node, where this script runs, and
    # outside of the range that the kernel assigns to clients.
    MASTER_ADDR="$(address_of "${NETWORK_INTERFACE:-}")"
    MASTER_ADDR="${MASTER_ADDR:-$(outside_address "$(field NodeAddr "$(scontrol show node "${NODES[0]}")")")}"
    MASTER_PORT="${MASTER_PORT:-$(free_port)}"
    export MASTER_ADDR MASTER_PORT
    # Ranks sign their messages with this key. Other users cannot see the environment of this script or of its steps.
    GRPO_MEGA_RUN_KEY="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
    export GRPO_MEGA_RUN_KEY

    NODE_SILENCE_SECONDS="${NODE_SILENCE_SECONDS:-30}"
    STOPPING="" IS_TERMINATED="" IS_REQUEUED="" BAD_NODES="" STEP_PID="" STOP_AT=9999999999
    export STATE RUN_DIR RANKS_PER_NODE NODE_SILENCE_SECONDS
    export START="$SLURM_JOB_ID.$RESTARTS"
    mkdir -p "$(dirname "$RUN_DIR")"
    MADE_RUN_DIR=""
    if [[ ! -d "$RUN_DIR" ]]; then
        mkdir -m 700 "$RUN_DIR" # private: other users of the nodes must not read the run
        MADE_RUN_DIR=1
    fi
    mkdir -p "$STATE/beats" "$STATE/failures"
    rm -f "$STATE"/beats/* "$STATE"/failures/*
    ((RESTARTS > 0)) || rm -f "$STATE/finished" # a new job may continue a finished run for more steps
    # The ranks of a node share its cores. With a thread per core in each rank they would compete for them. Each rank sets the
    # variables of CUDA, NCCL and gloo itself: grpo_mega/distributed/environment.py.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1
}

# Give all steps the environment of this script, however sbatch was called: srun reads its options from variables, and with
# `sbatch --export` one of them keeps PATH and the rest from the steps. If sbatch was called inside another allocation, its variables
# are still here. So read this job's numbers from Slurm, and keep only variables that Slurm has set for this job.
keep_own_variables() {
    local name job
    job="$(scontrol show job "$SLURM_JOB_ID")"
    RESTARTS="$(field Restarts "$job")"
    RESTARTS="${RESTARTS:-${SLURM_RESTART_COUNT:-0}}"
    CPUS_PER_TASK="$(field CPUs/Task "$job")"
    for name in "${!SLURM_@}"; do
        case "$name" in
            SLURM_JOB_ID | SLURM_JOB_NAME | SLURM_JOB_NUM_NODES | SLURM_JOB_NODELIST | SLURM_CONF | SLURM_CONF_SERVER | SLURM_JWT) ;;
            *) unset "$name" ;;
        esac
    done
    export SLURM_EXPORT_ENV=ALL PATH # without a PATH in its environment, bash has one but does not pass it on
}

# Print the IPv4 address of an interface of this node. Print nothing without a name, an address or the program ip.
address_of() {
    [[ -z "$1" ]] || { ip -4 -o address show dev "$1" | grep -oP 'inet \K[0-9.]+' | head -n 1; } 2> /dev/null
}

# Print an address of the first node, given as an address or a name, that other nodes can reach. Debian and Ubuntu map a node's name
# to 127.0.1.1 on the node itself, so the second node is asked too.
outside_address() {
    local address lookup=(getent ahosts "$1")
    if [[ "$1" != *[:]* && ! "$1" =~ ^[0-9.]+$ ]]; then
        address="$("${lookup[@]}" | awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }')"
        if [[ -z "$address" ]] && ((NUM_NODES > 1)); then
            address="$(srun --nodes=1 --ntasks=1 --nodelist="${NODES[1]}" "${lookup[@]}" 2> /dev/null |
                awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }')"
        fi
    fi
    echo "${address:-$1}"
}

# In a container's list of mounts, a comma ends a mount and a colon ends its first path.
check_mounts() {
    [[ -n "${CONTAINER:-}" ]] || return 0
    local name
    for name in ROOT RUN_DIR MODEL DATA NODE_LOCAL; do
        if [[ "${!name:-}" == *[:,]* && ( "$name" != DATA || -e "$DATA" ) ]]; then
            echo "error: $name=${!name}: must have no ':' and no ',' with CONTAINER, which mounts it; move or rename the folder" >&2
            exit "$EXIT_CONFIG"
        fi
    done
}

# field NAME TEXT: print the value of NAME=value in output of scontrol.
field() {
    grep -oP "(?<![A-Za-z])$1=\K\S+" <<< "$2" | head -n 1
}

free_port() {
    local port
    for port in $(shuf -i 10000-19999 -n 50); do
        if ! (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
            echo "$port"
            return
        fi
    done
}

# --- Running commands on the nodes -----------------------------------------------------------------------------------------

# on_nodes NODES SRUN_ARGUMENT ... -- COMMAND ...: start one task per node in the background and set STEP_PID to srun's process
# id. The tasks run in CONTAINER if it is set: with apptainer for a .sif file, otherwise with pyxis (.sqsh, docker://, or other
# names that enroot knows).
on_nodes() {
    local nodes="$1" step=() wrap=()
    shift
    while [[ "$1" != -- ]]; do
        step+=("$1")
        shift
    done
    shift
    local mounts="$ROOT:$ROOT,$RUN_DIR:$RUN_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
    [[ -e "$MODEL" ]] && mounts+=",$MODEL:$MODEL"
    [[ -e "$DATA" ]] && mounts+=",$DATA:$DATA"
    [[ -n "${NODE_LOCAL:-}" ]] && mounts+=",$NODE_LOCAL:$NODE_LOCAL"
    case "${CONTAINER:-}" in
        "") ;;
        *.sif) wrap=(apptainer exec --nv --bind "$mounts" --pwd "$ROOT" "$CONTAINER") ;;
        *) step+=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$ROOT") ;;
    esac
    # srun does not inherit --cpus-per-task, and would bind every rank of a node to one core.
    # Slurm says 1 also if the job did not ask for a number. Then a step has all of the job's cores.
    [[ "$CPUS_PER_TASK" =~ ^[0-9]+$ ]] && ((CPUS_PER_TASK > 1)) && step+=(--cpus-per-task="$CPUS_PER_TASK")
    local count
    count="$(tr ',' '\n' <<< "$nodes" | wc -l)"
    srun --nodelist="$nodes" --nodes="$count" --ntasks="$count" --ntasks-per-node=1 "${step[@]}" "${wrap[@]}" "$@" &
    STEP_PID=$!
}

# wait_for PID: wait for a process and return its exit code. A signal interrupts `wait` so that its trap runs at once; then wait
# again.
wait_for() {
    local code
    while true; do
        wait "$1"
        code=$?
        kill -0 "$1" 2> /dev/null || return "$code"
    done
}

joined() {
    local IFS=,
    echo "$*"
}

# --- Training --------------------------------------------------------------------------------------------------------------

train() {
    local resume=()
    [[ -f "$RUN_DIR/run.json" ]] && resume=(--resume)
    rm -f "$RUN_DIR/stop" # left behind by a start that died before it read the file
    CHECKPOINT_BEFORE="$(latest_checkpoint)"
    declare -gA LAST_BEAT=() HEARD_AT=()
    : > "$STATE/training"
    beat
    on_nodes "$(joined "${NODES[@]}")" --kill-on-bad-exit=1 -- "$PYTHON" slurm/node.py train "${TRAIN[@]}" "${resume[@]}"
    local failed_at=""
    LOST_NODES="" IS_ASKED=""
    while kill -0 "$STEP_PID" 2> /dev/null; do
        beat
        ask_to_stop
        if [[ -z "$failed_at" ]] && compgen -G "$STATE/failures/*" > /dev/null; then
            failed_at=$SECONDS
        fi
        find_lost_nodes "$NODE_SILENCE_SECONDS"
        # srun itself waits for a lost node until Slurm gives up the node after some minutes.
        if [[ -n "$LOST_NODES" ]] || { [[ -n "$failed_at" ]] && ((SECONDS - failed_at > SECONDS_TO_REPORT)); }; then
            kill_srun
        fi
        [[ -e "$RUN_DIR/stop" ]] && IS_ASKED=1
        sleep 1 &
        wait $!
    done
    STEP_CODE=0
    wait_for "$STEP_PID" || STEP_CODE=$?
}

# Kill srun and its child. The child cancels the step if srun dies. It identifies the step by number and keeps trying while a node
# does not answer, so it would cancel the step with the same number in the next start.
kill_srun() {
    pkill -KILL --parent "$STEP_PID"
    kill -KILL "$STEP_PID" 2> /dev/null
}

latest_checkpoint() {
    cat "$RUN_DIR/checkpoints/latest" 2> /dev/null
}

# Write a heartbeat for this start of the job. Without it the nodes kill their ranks.
beat() {
    mkdir -p "$STATE/beats" "$STATE/failures"
    echo "$START $SECONDS" > "$STATE/.job_beat" && mv "$STATE/.job_beat" "$STATE/job_beat"
}

# Add nodes to LOST_NODES that have sent no heartbeat for $1 seconds and do not answer. Heartbeats are files, so a node without
# them may only have a slow file system.
find_lost_nodes() {
    local node last
    for node in "${NODES[@]}"; do
        [[ ",$LOST_NODES," != *",$node,"* ]] || continue
        last="$(cat "$STATE/beats/$node" 2> /dev/null)"
        if [[ "${LAST_BEAT[$node]:-}" != "$last" ]]; then
            LAST_BEAT[$node]="$last"
            HEARD_AT[$node]=$SECONDS
        elif [[ -n "$last" ]] && ((SECONDS - HEARD_AT[$node] > $1)) && ! answers "$node"; then
            LOST_NODES+="${LOST_NODES:+,}$node"
        fi
    done
}

answers() {
    timeout "$SECONDS_TO_ANSWER" srun --overlap --nodelist="$1" --nodes=1 --ntasks=1 --immediate="$SECONDS_TO_ANSWER" true \
        > /dev/null 2>&1
}

# --- Signals ---------------------------------------------------------------------------------------------------------------

# Compute when to ask the run to stop: LEAD_SECONDS before the time limit, to leave time for the current step, a save and its
# verification.
start_timer() {
    local end left
    end="$(field EndTime "$(scontrol show job "$SLURM_JOB_ID")")"
    end="$(date -d "$end" +%s 2> /dev/null)" || return 0 # "Unknown": no time limit
    left=$((end - EPOCHSECONDS - LEAD_SECONDS))
    if ((left <= 0)); then
        left=$(((left + LEAD_SECONDS) / 2))
        say "warning: the time limit leaves less than the $LEAD_SECONDS s that a step and a save may take; raise --time"
    fi
    STOP_AT=$((EPOCHSECONDS + left))
    say "will stop in $left s, $LEAD_SECONDS s before the time limit"
}

on_usr1() {
    [[ -z "$STOPPING" ]] || return 0
    say "asked to stop: the run will save after this step, then the job will requeue itself"
    STOPPING=1
}

# Slurm sends TERM in the grace period of a preemption, on scancel, and after this script's own `scontrol requeue`.
on_term() {
    if [[ -n "$IS_REQUEUED" ]]; then
        exclude_bad_nodes
        exit 0
    fi
    [[ -n "$STOPPING" ]] || say "asked to end: the run will save after this step if Slurm leaves enough time"
    STOPPING="${STOPPING:-1}" IS_TERMINATED=1
}

# Create the file RUN_DIR/stop, which ranks look for after every step. Wait until there is a run to stop.
ask_to_stop() {
    ((EPOCHSECONDS < STOP_AT)) || on_usr1
    if [[ -n "$STOPPING" && "$STOPPING" != asked && -f "$RUN_DIR/run.json" ]]; then
        touch "$RUN_DIR/stop"
        STOPPING=asked
    fi
}

# --- The end of a start ----------------------------------------------------------------------------------------------------

is_finished() {
    [[ -f "$STATE/finished" ]]
}

judge() {
    if ((STEP_CODE == 0)) && [[ -z "$LOST_NODES" ]]; then
        if [[ "$RUN_DIR/hf" -nt "$STATE/training" ]]; then
            touch "$STATE/finished"
            say "finished: $RUN_DIR/hf"
            exit 0
        fi
        if [[ -z "$STOPPING" && -n "$IS_ASKED" ]]; then
            say "stopped because $RUN_DIR/stop was created; sbatch again with RUN_DIR=$RUN_DIR to continue"
            exit 0
        fi
        rm -f "$STATE/starts_without_save"
        requeue "stopped at $(latest_checkpoint)"
    fi
    report_failure
    if [[ -z "$LOST_NODES" && "$FIRST_CODE" == "$EXIT_CONFIG" ]]; then
        say "not requeued: fix the error above first"
        discard_state
        exit "$EXIT_CONFIG"
    fi
    requeue_or_give_up
}

# Report the first failure by node and rank. Set FIRST_CODE to the exit code of that rank.
report_failure() {
    local node first others
    find_lost_nodes 5
    for node in ${LOST_NODES//,/ }; do
        say "node $node ($(ranks_of "$node")) does not answer"
    done
    first="$(cat "$STATE"/failures/* 2> /dev/null | sort -n | head -n 1)"
    FIRST_CODE="$(cut -f 2 <<< "$first")"
    [[ -z "$first" ]] || say "first failure: $(cut -f 3- <<< "$first")"
    others="$(cat "$STATE"/failures/* 2> /dev/null | sort -n | tail -n +2 | cut -f 3- | cut -d ' ' -f 2-4 | tr -d ';' | paste -sd ,)"
    [[ -z "$others" ]] || say "after it: ${others//,/, }"
    [[ -n "$first$LOST_NODES" ]] || say "srun ended with code $STEP_CODE"
}

ranks_of() {
    local number
    for number in "${!NODES[@]}"; do
        [[ "${NODES[$number]}" == "$1" ]] || continue
        echo "ranks $((number * RANKS_PER_NODE))-$(((number + 1) * RANKS_PER_NODE - 1))"
    done
}

# After a failure, requeue the job if this start saved something, or is the first that did not. Give up if the count cannot be
# written, for example on a full disk, because the job would restart forever.
requeue_or_give_up() {
    local count=0 now file="$STATE/starts_without_save"
    now="$(latest_checkpoint)"
    if [[ -z "$now" || "$now" == "${CHECKPOINT_BEFORE-$now}" ]]; then
        [[ ! -e "$file" ]] || count="$(cat "$file" 2> /dev/null)"
        [[ "$count" =~ ^[0-9]{1,6}$ ]] || count=$MAX_STARTS_WITHOUT_SAVE # the file is damaged
        count=$((10#$count + 1))
    fi
    mkdir -p "$STATE" 2> /dev/null
    if ! { echo "$count" > "$file.new" && mv "$file.new" "$file"; } 2> /dev/null || [[ "$(cat "$file")" != "$count" ]]; then
        say "given up: $file cannot be written; free its disk, then sbatch again with RUN_DIR=$RUN_DIR"
        exit 1
    fi
    if ((count >= MAX_STARTS_WITHOUT_SAVE)); then
        say "given up after $count starts in a row that saved nothing; fix the cause, then sbatch again with RUN_DIR=$RUN_DIR"
        exit 1
    fi
    requeue "the last checkpoint is ${now:-none}"
}

# Requeue the job and end the script. Slurm ends this start and sends TERM; the next start has the same id and arguments. Two traps:
# Slurm itself requeues a job if it has given up one of its nodes, and a busy controller may not answer at once.
requeue() {
    [[ -z "$IS_TERMINATED" ]] || leave_ended_job
    say "requeued: $*"
    IS_REQUEUED=1
    local tries=1
    until scontrol requeue "$SLURM_JOB_ID"; do
        leave_ended_job
        if ((tries++ >= TRIES_TO_REQUEUE)); then
            say "error: cannot be requeued; sbatch again with RUN_DIR=$RUN_DIR"
            exit 1
        fi
        sleep 5 &
        wait $!
    done
    while true; do
        sleep 1 &
        wait $!
    done
}

leave_ended_job() {
    local state
    state="$(field JobState "$(scontrol show job "$SLURM_JOB_ID")")"
    if [[ -n "$state" && "$state" != RUNNING ]]; then
        say "left to Slurm, which has cancelled the job or requeues it"
        exit 0
    fi
}

# Exclude BAD_NODES from the next start. Slurm does not change the excluded nodes of a running job, and a pending job may get its
# nodes at once. So change them while Slurm ends the requeued start.
exclude_bad_nodes() {
    [[ -n "$BAD_NODES" ]] || return 0
    local excluded
    excluded="$(field ExcNodeList "$(scontrol show job "$SLURM_JOB_ID")")"
    [[ "$excluded" == "(null)" ]] && excluded=""
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${excluded:+$excluded,}$BAD_NODES"
    excluded="$(field ExcNodeList "$(scontrol show job "$SLURM_JOB_ID")")"
    say "nodes excluded from now on: $excluded"
}
