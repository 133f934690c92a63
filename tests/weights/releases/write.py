"""Write each family's config.json as a release of transformers saves it, and the release's reading of it.

`PYTHONPATH=FOLDER python tests/weights/releases/write.py` writes RELEASE.json beside this file. FOLDER has the release,
as `pip install --target FOLDER transformers==RELEASE` writes it. Nothing of the project is imported, so the readings
are an oracle for it.
"""

import json
import tempfile
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

IS_OLD = transformers.__version__.startswith("4.")
SIZES = {
    "vocab_size": 101,
    "hidden_size": 30,
    "intermediate_size": 47,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 77,
    "bos_token_id": 3,
    "eos_token_id": 5,
}
EXPERTS = {"moe_intermediate_size": 13, "num_experts_per_tok": 2}
SHARED = EXPERTS | {
    "n_routed_experts": 5,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = SHARED | {
    "num_key_value_heads": 3,
    "kv_lora_rank": 9,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 6,
    "v_head_dim": 11,
}
HYBRID = {"head_dim": 24, "linear_num_key_heads": 1, "linear_num_value_heads": 3, "full_attention_interval": 2}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 14},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 14},
    "qwen3_moe": EXPERTS | {"num_experts": 5, "head_dim": 14, "norm_topk_prob": True},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | EXPERTS | {"num_experts": 5, "shared_expert_intermediate_size": 7},
    "deepseek_v2": LATENT | {"topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "glm4_moe": SHARED | {"head_dim": 12, "attention_bias": True},
    "glm4_moe_lite": LATENT,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "factor": 7.0,
    "original_max_position_embeddings": 11,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def ropes(family):
    """Return the base and the scaling of each case. Without a base, the release takes its default."""
    is_latent = "kv_lora_rank" in FAMILIES[family]
    scaled = YARN if is_latent else LLAMA3 | {"original_max_position_embeddings": 11} if family == "llama" else LINEAR
    return {"default": (None, {}), "theta": (500000.0, {}), "scaled": (123456.0, scaled)}


def make(family, theta, scaling, **more):
    """Return a config, made as this release's users make it."""
    fields = SIZES | FAMILIES[family] | more
    if IS_OLD:
        fields |= {"rope_theta": theta} if theta else {}
        fields |= {"rope_scaling": scaling} if scaling else {}
    elif theta:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta} | scaling
    return CONFIG_MAPPING[family](**fields, dtype="bfloat16")


def readings(config):
    """Return the rotary embedding of a config object of this release."""
    if IS_OLD:
        scaling = dict(getattr(config, "rope_scaling", None) or {"rope_type": "default"})
        scaling.pop("type", None)  # 4.57 adds the older name beside the new one, or the reverse
        theta, share = config.rope_theta, getattr(config, "partial_rotary_factor", None)
    else:
        scaling = dict(config.rope_parameters)
        theta, share = scaling.pop("rope_theta"), scaling.pop("partial_rotary_factor", None)
    said = {"rope_theta": theta, "partial_rotary_factor": share, "scaling": scaling}
    if scaling["rope_type"] != "default":
        angles, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
        said |= {"inv_freq": angles.tolist(), "attention_scaling": scale}
    return said


def main():
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)

        def add(name, config):
            config.save_pretrained(path)
            loaded = AutoConfig.from_pretrained(path)
            cases[name] = {
                "config": json.loads((path / "config.json").read_text()),
                "reads": readings(loaded.get_text_config()),
            }

        for family in FAMILIES:
            if family in CONFIG_MAPPING:
                for kind, rope in ropes(family).items():
                    add(f"{family}-{kind}", make(family, *rope))
        for family, text in MULTIMODAL.items():
            if family in CONFIG_MAPPING:
                for kind, rope in ropes(text).items():
                    vision = {
                        "depth": 1,
                        "hidden_size": 12,
                        "intermediate_size": 20,
                        "num_heads": 2,
                        "out_hidden_size": 30,
                    }
                    text_config = make(text, *rope).to_dict()
                    add(f"{family}-{kind}", CONFIG_MAPPING[family](text_config=text_config, vision_config=vision))
    # Of a family's later cases only the fields that differ from its first case are written.
    for name, case in cases.items():
        first = cases[f"{name.partition('-')[0]}-default"]["config"]
        assert first.keys() <= case["config"].keys()
        if case["config"] is not first:
            case["config"] = {key: value for key, value in case["config"].items() if first.get(key) != value}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    (Path(__file__).parent / f"{transformers.__version__}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
