"""Make a model folder without weights: `python examples/tiny_random_model.py OUT`.

Output: OUT/config.json of a Qwen2 with 2 layers and hidden size 64, for model.init=random; a tokenizer with one token
per byte, so it accepts any text; a chat template. Nothing is downloaded or trained. Layers, heads and vocabulary are
divisible by 2, as tp=2 and pp=2 need.
"""

import argparse
import json

from tokenizers.pre_tokenizers import ByteLevel
from transformers import AddedToken, Qwen2Config, Qwen2Tokenizer

from grpo_mega.checkpoint_io.hf_files import with_old_fields
from grpo_mega.paths import user_path
from grpo_mega.text import filter_output

SPECIAL_TOKENS = ["<pad>", "<eos>", "<system>", "<user>", "<assistant>", "<end>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
VOCAB_SIZE = 304  # number of tokens, rounded up


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model folder without weights, for model.init=random.")
    parser.add_argument("out", type=user_path, help="folder to write to")
    out = parser.parse_args().out
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out, save_jinja_files=False)
    make_config(tokenizer).save_pretrained(out)
    config = out / "config.json"
    config.write_text(json.dumps(with_old_fields(json.loads(config.read_text()), "float32"), indent=2) + "\n")
    print(f"{len(tokenizer)} tokens, one per byte; see {out}")


def make_tokenizer() -> Qwen2Tokenizer:
    """Make a byte-level BPE tokenizer without merges."""
    names = SPECIAL_TOKENS + sorted(ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={name: i for i, name in enumerate(names)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token=None,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    return tokenizer


def make_config(tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    """Return the model's config. Both <eos> and <end> end a response."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end>")],
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    )


if __name__ == "__main__":
    filter_output()
    main()
