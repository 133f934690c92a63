"""Tiny checkpoints of every supported family, created by transformers, and a comparison of checkpoint folders."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_mega.checkpoint_io.checkpoints import FORMAT, Manifest
from grpo_mega.paths import MANIFEST
from tests.helpers.models import CLASSES, MIXTURES, make_model, make_multimodal, make_tokenizer, write_both_generations

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Case:
    """A checkpoint to create. `model`: the family's name in tests. `changes`: config fields."""

    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    has_extra_layer: bool = False  # adds a layer for multi-token prediction
    stacks_experts: bool = True  # False: writes one tensor per expert also where the hub's folders do not


# Cases for pp=4 with vpp=2 have eight layers. The vocabulary size 102 is not divisible by 4.
CASES = {
    "llama1": Case("llama", {"num_key_value_heads": 4}, torch.float16),
    "llama2": Case("llama", {"num_hidden_layers": 8}),
    "llama3": Case("llama", {"rope_parameters": LLAMA3_ROPE, "tied": True}, torch.bfloat16),
    "mistral": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", {}, torch.bfloat16),
    "qwen2_5": Case("qwen2", {"tied": True, "use_sliding_window": False, "max_window_layers": 4}),
    "qwen3": Case("qwen3", {"tied": True}),
    "qwen3_5_text": Case("qwen3_5_text", {"tied": True, "num_hidden_layers": 5}),
    "qwen3_5": Case("qwen3_5", {"num_hidden_layers": 8}, torch.bfloat16),
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", {"num_hidden_layers": 5, "num_experts": 3}),
    "qwen3_5_moe": Case("qwen3_5_moe", {"tied": True, "num_experts": 5}, torch.bfloat16, has_extra_layer=True),
    "deepseek_v2": Case("deepseek_v2"),
    "deepseek_v3": Case("deepseek_v3", {"q_lora_rank": 10}, torch.bfloat16, has_extra_layer=True),
    "deepseek_v3_no_dense": Case("deepseek_v3", {"first_k_dense_replace": 0, "num_hidden_layers": 4}),
    "glm4_moe": Case("glm4_moe", {"use_qk_norm": True}, torch.bfloat16),
    "glm4_moe_lite": Case("glm4_moe_lite", {}, torch.bfloat16),
    "mixtral": Case("mixtral"),
    "qwen3_moe": Case("qwen3_moe", {}, torch.bfloat16),
}
CASES |= {name: Case(name) for name in CLASSES | MIXTURES if all(name != case.model for case in CASES.values())}
_MIXTURES = {"mixtral": (MixtralConfig, MixtralForCausalLM), "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)}


def save(case: Case, folder: Path, max_shard_size: str = "5GB") -> Path:
    """Write a checkpoint with config, generation config and tokenizer. Return its folder."""
    if case.model in ("qwen3_5", "qwen3_5_moe"):
        model = make_multimodal(f"{case.model}_text", dtype=case.dtype, **case.changes)
    elif case.model in _MIXTURES:
        model = _mixture(case)
    else:
        model = make_model(case.model, dtype=case.dtype, **case.changes)
    model.generation_config = GenerationConfig(eos_token_id=[1], pad_token_id=0, temperature=0.6, do_sample=True)
    # transformers writes one tensor per expert, except in the format of its models.
    splits_experts = not (case.model.startswith("qwen3_5_moe") and case.stacks_experts)
    model.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=splits_experts)
    write_both_generations(folder)
    make_tokenizer().save_pretrained(folder, save_jinja_files=False)
    if case.has_extra_layer:
        _add_extra_layer(folder, model.config, case.dtype)
    return folder


def _add_extra_layer(folder: Path, config: Any, dtype: torch.dtype) -> None:
    """Add a layer for multi-token prediction, like DeepSeek-V3 after the last layer, or like Qwen3.5.

    It has norms, a matrix that joins two inputs, and separate heads or experts.
    """
    shapes = {"enorm.weight": [36], "eh_proj.weight": [36, 72], "embed_tokens.weight": [102, 36]}
    shapes |= {"shared_head.head.weight": [102, 36], "mlp.gate.weight": [12, 36]}
    if is_hybrid := config.model_type == "qwen3_5_moe":
        shapes = {"fc.weight": [32, 64], "norm.weight": [32], "layers.0.mlp.experts.gate_up_proj": [5, 44, 32]}
    prefix = "mtp." if is_hybrid else f"model.layers.{config.num_hidden_layers}."
    tensors = {f"{prefix}{name}": torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    if not is_hybrid:
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = torch.randn(12)
    index = folder / "model.safetensors.index.json"
    file = "model-extra.safetensors" if index.exists() else "model.safetensors"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(tensors, file)
        index.write_text(json.dumps(content))
    else:
        tensors |= load_file(folder / file)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    if not is_hybrid:
        edit_config(folder, num_nextn_predict_layers=1)


def _mixture(case: Case) -> Any:
    """Return a model with four experts and norm weights different from 1."""
    config_class, model_class = _MIXTURES[case.model]
    own = (
        {"num_local_experts": 4}
        if case.model == "mixtral"
        else {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16}
    )
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 102,
        "max_position_embeddings": 256,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "router_jitter_noise": 0.0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**(sizes | own | case.changes)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    return model.to(case.dtype).eval().requires_grad_(False)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_folder(found: Path, expected: Path) -> None:
    """Compare all tensors bit for bit, and all other files except the shard index byte for byte."""
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    sides = [{p.name for p in folder.iterdir() if "safetensors" not in p.name} for folder in (found, expected)]
    assert sides[0] == sides[1]
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= sides[0]
    for name in sides[0]:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json. Remove fields whose value is None."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def write_manifest(
    checkpoint: Path,
    step: int,
    *,
    optimizer_step: int = 0,
    layout: str = "tp=1,pp=1,vpp=1,cp=1,dp=1",
    format: int = FORMAT,
    written_at: float = 0.0,
    versions: str = "one",
) -> None:
    """Write the manifest that turns a folder into a checkpoint of a run."""
    manifest = Manifest(step, optimizer_step, "00c0ffee", layout, model={}, seed=0, checksums={}, draws=step, inputs={})
    values = asdict(manifest) | {"format": format, "written_at": written_at, "versions": versions}
    (checkpoint / MANIFEST).write_text(json.dumps(values))
