"""Tiny Hugging Face models for tests: random weights with norms away from 1 and biases away from 0, saved as real
checkpoints.

The default sizes allow layouts up to tp=2 and pp=4, and tp=4 with num_key_value_heads=4. `changes` are config fields.
The tokenizer has one token per character and a chat template without a prefill.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AddedToken,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_mega.checkpoint_io.hf_files import with_old_fields

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}
FAMILIES = tuple(CLASSES)  # dense models
MULTIMODAL: dict[str, tuple[Any, Any]] = {
    "qwen3_5_text": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe_text": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
MIXTURES: dict[str, tuple[Any, Any]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

# Five layers, the first without experts. 12 experts in 3 groups; a token uses 2 groups. Two shared experts in a single
# MLP.
LATENT = {
    "num_hidden_layers": 5,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_local_experts": 12,
    "moe_intermediate_size": 20,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

# Three layers of linear attention before each layer of full attention. With a smaller epsilon norms of small outputs
# would amplify rounding, in transformers too.
HYBRID = {
    "rms_norm_eps": 1e-2,
    "initializer_range": 0.08,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
}

HYBRID_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 14,
}

GLM = {
    "head_dim": 12,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_local_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 20,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>"]
CHARACTERS = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # the last two are byte-level BPE's names of " " and "\n"
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)  # 102
PAD_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def make_config(family: str, *, tied: bool = False, **changes: Any) -> Any:
    """Return a config with 4 layers, hidden 32, 4 heads, 2 key-value heads of width 8 (qwen3: 16), ffn 48, vocabulary
    102.

    Mixtures have 4 experts. Each token uses 2 of them.
    """
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": tied,
    }
    own: dict[str, Any] = {"head_dim": 16} if family.startswith("qwen3") else {}
    own |= HYBRID if family.startswith("qwen3_5") else {}
    if family == "qwen3_5_moe_text":
        own |= HYBRID_MOE
        del sizes["intermediate_size"]
    elif family in MIXTURES:
        own |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "sliding_window": None}
    if family == "glm4_moe":
        own |= GLM
    if family.startswith("deepseek") or family == "glm4_moe_lite":
        own |= LATENT | ({"num_experts_per_tok": 4} if family != "deepseek_v2" else {})
    if family == "glm4_moe_lite":  # transformers' norms of latents have this epsilon for any model
        own |= {"rms_norm_eps": 1e-6, "q_lora_rank": 10}
    config = (CLASSES | MIXTURES)[family][0](**(sizes | own | changes))
    if family == "qwen3_5_moe_text":
        config._experts_implementation = "eager"  # torch.grouped_mm does not support all row sizes
    return config


def make_model(
    family: str, *, seed: int = 0, tied: bool = False, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Return a model in evaluation mode. The seed decides the weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (CLASSES | MIXTURES)[family][1](make_config(family, tied=tied, **changes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    centre = 0 if family.startswith("qwen3_5") and not name.endswith("linear_attn.norm.weight") else 1
                    parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
                elif name.endswith((".A_log", ".dt_bias")):
                    parameter.copy_(torch.randn_like(parameter) - 2)
                elif name.endswith(".bias"):
                    parameter.copy_(0.3 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.1 * torch.randn_like(buffer))
    return as_float32_where_needed(model.to(dtype).eval().requires_grad_(False))


def make_multimodal(
    family: str = "qwen3_5_text", *, tied: bool = False, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Return a Qwen3.5 model with a vision tower. Its language model is make_model(family, ...)."""
    text = make_model(family, tied=tied, **changes)
    sizes = {"depth": 1, "hidden_size": 12, "intermediate_size": 20, "num_heads": 2, "patch_size": 2}
    vision = {**sizes, "out_hidden_size": text.config.hidden_size, "num_position_embeddings": 9}
    tokens = dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config_class, model_class = MULTIMODAL[family]
        text_config = text.config.to_dict()
        model = model_class(
            config_class(text_config=text_config, vision_config=vision, tie_word_embeddings=tied, **tokens)
        )
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return as_float32_where_needed(model.to(dtype).eval().requires_grad_(False))


def as_float32_where_needed(model: Any) -> Any:
    """Return the model. Tensors that are float32 in every checkpoint become float32."""
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(("e_score_correction_bias", ".A_log", ".dt_bias")):
            tensor.data = tensor.data.float()
    return model


def make_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer with one token per character. It drops all but printable ASCII, space and newline."""
    vocabulary = {name: i for i, name in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    return tokenizer


def write_both_generations(folder: Path) -> None:
    """Add the fields that transformers 4 reads to a config.json, so that an export copies it byte for byte."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(with_old_fields(config, config["dtype"]), indent=2, sort_keys=True) + "\n")


def save_checkpoint(
    model: Any, folder: Path, *, max_shard_size: str = "5GB", eos_token_ids: tuple[int, ...] = (EOS_ID,)
) -> Path:
    """Save model, generation config and tokenizer. Return `folder`."""
    model.generation_config = GenerationConfig(eos_token_id=list(eos_token_ids), pad_token_id=PAD_ID)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_both_generations(folder)
    make_tokenizer().save_pretrained(folder, save_jinja_files=False)
    return folder
