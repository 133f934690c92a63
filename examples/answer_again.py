"""Answer a finished run's held-out prompts with transformers and the exported checkpoint, and compare with the run's
answers.

`python examples/answer_again.py RUN_DIR [--prompts 64]` exits with 1 unless all greedy answers have the same tokens. If
they do, the exported checkpoint is the policy that the run trained.
"""

import argparse
import json
import os
import sys

# Must be set before torch is imported: threads that spin are ten times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mega.paths import user_path
from grpo_mega.text import filter_output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=user_path)
    parser.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args()
    last = sorted(options.run_dir.glob("heldout-*.jsonl"))[-1]
    with last.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][: options.prompts]
    checkpoint = options.run_dir / "hf"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    if tokenizer.pad_token is None:  # the attention mask hides the padding, so any token will do
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, add_special_tokens=False)
    longest = max(len(row["token_ids"]) for row in rows)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=longest, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    same = sum(
        answer[: len(row["token_ids"])] == row["token_ids"] for answer, row in zip(out.tolist(), rows, strict=True)
    )
    print(f"transformers gives the run's answer to {same} of {len(rows)} held-out prompts from {checkpoint}")
    return 0 if same == len(rows) else 1


if __name__ == "__main__":
    filter_output()
    sys.exit(main())
