#!/usr/bin/env bash
# transformers 5.12.1 saves a config whose rotary embedding transformers 4.57.6 replaces by the default, without a word.
#
# 5.x writes rope_theta and the scaling into `rope_parameters` only. 4.57 reads `rope_theta` and `rope_scaling`, and takes its defaults if
# they are missing. Expected: the same angles, a warning, or an error, because config.json names the version that wrote it. A model that was
# fine-tuned with 5.x and is served by a program that pins 4.57 computes other logits. This project's exports add the fields that 4.57 reads.
#
# Seen on 2026-11-28, for a config like that of Llama 3.1:
#   5.12.1 wrote rope_parameters: llama3, rope_theta 500000.0, factor 8.0
#   4.57.6 reads rope_theta=10000.0 rope_scaling=None, warnings: 0
set -euo pipefail

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
for version in 4.57.6 5.12.1; do
    "${PYTHON:-python3.11}" -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
done

"$work/5.12.1/bin/python" - "$work/model" 2> "$work/log" <<'PYTHON'
import json
import sys

from transformers import LlamaConfig

scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
scaling |= {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
LlamaConfig(max_position_embeddings=131072, rope_parameters=scaling).save_pretrained(sys.argv[1])
written = json.load(open(f"{sys.argv[1]}/config.json"))
rope = written["rope_parameters"]
version = written["transformers_version"]
print(f"{version} wrote rope_parameters: {rope['rope_type']}, rope_theta {rope['rope_theta']}, factor {rope['factor']}")
PYTHON

"$work/4.57.6/bin/python" - "$work/model" 2> "$work/log" <<'PYTHON'
import logging
import sys
import warnings

import transformers
from transformers import AutoConfig

logged = []
handler = logging.Handler(logging.WARNING)
handler.emit = logged.append
transformers.utils.logging.get_logger().addHandler(handler)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    config = AutoConfig.from_pretrained(sys.argv[1])
num_warnings = len(logged) + len(caught)
seen = f"rope_theta={config.rope_theta} rope_scaling={config.rope_scaling}, warnings: {num_warnings}"
print(f"{transformers.__version__} reads {seen}")
if seen != "rope_theta=10000.0 rope_scaling=None, warnings: 0":
    sys.exit("changed: transformers 4.57 no longer drops the rotary embedding of 5.x without a word")
PYTHON
