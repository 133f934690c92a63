#!/usr/bin/env bash
# Check the config and the nodes and copy the model before the ranks start. job.sh sources this script, which uses its variables
# and functions. Each function returns if all is well; otherwise it ends or requeues the job.

# Check the config and the files of model and data on one node. Do not requeue on their errors. Also estimate the time of a step
# and of a save with the plan.
prepare() {
    TRAIN=("$CONFIG" --set "run_dir=$RUN_DIR" --set "model.path=$MODEL" --set "data.train=$DATA" "${OVERRIDES[@]}")
    on_nodes "${NODES[0]}" --output="$STATE/prepare.txt" -- "$PYTHON" slurm/prepare.py \
        --world-size "$((NUM_NODES * RANKS_PER_NODE))" --ranks-per-node "$RANKS_PER_NODE" \
        --disk-gbps "${DISK_GBPS:-2}" --gpu "${PLAN_GPU:-h100}" "${TRAIN[@]}"
    local code=0
    wait_for "$STEP_PID" || code=$?
    grep -v '^\(LEAD_SECONDS\|NEEDS_NVCC\)=' "$STATE/prepare.txt"
    if ((code == EXIT_CONFIG)); then
        say "not requeued: fix the config first"
        discard_state
        exit "$EXIT_CONFIG"
    elif ((code != 0)); then
        say "node ${NODES[0]} cannot run $PYTHON slurm/prepare.py (code $code)"
        requeue_or_give_up
    fi
    NEEDS_NVCC="$(sed -n 's/^NEEDS_NVCC=//p' "$STATE/prepare.txt")"
    LEAD_SECONDS="${LEAD_SECONDS:-$(sed -n 's/^LEAD_SECONDS=//p' "$STATE/prepare.txt")}"
}

# Remove the folder of a run that has logged nothing, so that the same command works after the error is fixed.
discard_state() {
    [[ -e "$RUN_DIR/run.json" ]] && return
    rm -rf "$STATE"
    rmdir "$RUN_DIR/logs" 2> /dev/null
    [[ -z "$MADE_RUN_DIR" ]] || rmdir "$RUN_DIR" 2> /dev/null
}

# Check each node, then all nodes together. Name the nodes that fail and requeue the job without them. End the job if no node could
# run the check, if all nodes have the same problem, or if the network of many nodes is below the floor. A start on other nodes would
# probably fail too.
check_nodes() {
    [[ "${CHECK_NODES:-1}" == 1 ]] || return 0
    local folder="$STATE/checks" all code=0
    all="$(joined "${NODES[@]}")"
    rm -rf "$folder"
    mkdir -p "$folder"
    on_nodes "$all" --kill-on-bad-exit=0 -- timeout 300 "$PYTHON" tools/check_node.py --expect-gpus "$GPUS_PER_NODE" \
        --disks "$RUN_DIR:${MIN_FREE_GB:-1},${CHECK_DISKS:-}" --out "$folder" ${NEEDS_NVCC:+--nvcc}
    wait_for "$STEP_PID" || code=$?
    on_nodes "${NODES[0]}" -- "$PYTHON" tools/check_node.py --compare "$folder" "${NODES[@]}" > "$folder/bad"
    wait_for "$STEP_PID" || code=$?
    if ((code != 0)) && [[ ! -s "$folder/bad" ]]; then
        say "not requeued: the check of the nodes failed, and no node is to blame; see above"
        discard_state
        exit "$EXIT_CONFIG"
    fi
    if ((code == 0)) && [[ "${CHECK_ALLREDUCE:-1}" == 1 ]]; then
        on_nodes "$all" --kill-on-bad-exit=0 -- timeout 600 "$PYTHON" tools/check_allreduce.py --ranks "$RANKS_PER_NODE" \
            --node-floor "${ALLREDUCE_FLOOR_GBPS:-0}" --network-floor "${NETWORK_FLOOR_GBPS:-0}" --out "$folder/bad"
        wait_for "$STEP_PID" || code=$?
    fi
    ((code == 0)) && return
    if [[ -s "$folder/floor" ]]; then
        say "not requeued: $(< "$folder/floor")"
        discard_state
        exit "$EXIT_CONFIG"
    fi
    BAD_NODES="$(sort -u "$folder/bad" | paste -sd,)"
    say "pre-flight failed: ${BAD_NODES:-see above, no single node is to blame}"
    if [[ -n "$BAD_NODES" ]]; then
        requeue "without $BAD_NODES"
    fi
    requeue_or_give_up
}

# Copy the model to each node's own disk. A node reads 140 GB from its own disk in a minute; 64 ranks that read from a shared disk
# at once need many minutes.
stage_model() {
    [[ -n "${NODE_LOCAL:-}" ]] || return 0
    # The path must be the same in every start, because a run resumes only with the model that it started with.
    local target code=0
    target="$NODE_LOCAL/grpo_mega/$(basename "$MODEL")-$(cksum <<< "$MODEL" | cut -d ' ' -f 1)"
    on_nodes "$(joined "${NODES[@]}")" --kill-on-bad-exit=1 -- bash slurm/stage.sh "$MODEL" "$target"
    wait_for "$STEP_PID" || code=$?
    if ((code != 0)); then
        say "$MODEL could not be copied to $target (code $code); see above"
        requeue_or_give_up
    fi
    TRAIN+=(--set "model.path=$target")
}
