"""PEFT loads the adapter of every family and computes W + alpha / rank B A with each of its matrices.

The oracle adds the products to transformers' own parameters. Of PEFT's folders, those with the same numbers are read,
and all others are refused.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor

from grpo_mega.checkpoint_io import adapter
from grpo_mega.config import LoraConfig
from grpo_mega.errors import ConfigError
from grpo_mega.weights.boxes import whole
from grpo_mega.weights.derived import adapter_family
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import Family, ModelShape
from tests.helpers.models import FAMILIES, MIXTURES, MULTIMODAL, make_model, make_multimodal

TOKENS = torch.tensor([[3, 50, 7, 21, 9, 88, 4], [11, 5, 60, 33, 71, 8, 2]])
PARTS: dict[str, Callable[[str], bool]] = {
    "attention": lambda name: "attn" in name,
    "experts": lambda name: ".experts." in name,
    "shared experts": lambda name: "shared_expert" in name,
    "dense layers": lambda name: ".mlp." in name and "expert" not in name,
}
MODELS = {
    **{name: lambda name=name: make_model(name) for name in (*FAMILIES, *MIXTURES)},
    **{f"multimodal {name}": lambda name=name: with_vision(name) for name in MULTIMODAL},
    "qwen3 tied": lambda: make_model("qwen3", tied=True),
    "qwen3_moe tied": lambda: make_model("qwen3_moe", tied=True),
    "deepseek_v2 with a latent": lambda: make_model("deepseek_v2", q_lora_rank=10),
}
RANK, ALPHA = 3, 7.0


def with_vision(name: str) -> Any:
    model = make_multimodal(name)
    model.config.text_config._experts_implementation = "eager"  # torch.grouped_mm does not support all row sizes
    return model


def family_for(model: Any, targets: tuple[str, ...]) -> tuple[Family, ModelShape]:
    shape = ModelShape.from_hf_config(model.config.to_dict())
    return adapter_family(family_of(shape.model_type), shape, RANK, targets), shape


def random_tensors(family: Family, shape: ModelShape, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.3 * torch.randn(size, generator=generator) for n, size in family.hf_tensors(shape).items()}


def merge(model: Any, tensors: dict[str, Tensor], scale: float = ALPHA / RANK) -> Any:
    """Return a copy of the model with the products added. transformers stacks experts, and gate on up."""
    merged = copy.deepcopy(model)
    weights = dict(merged.named_parameters())
    for name, a in tensors.items():
        stem, is_a, _ = name.partition(".lora_A.")
        if not is_a:
            continue
        added = scale * tensors[f"{stem}.lora_B.weight"] @ a
        if f"{stem}.weight" in weights:
            weights[f"{stem}.weight"] += added
            continue
        experts, number, matrix = stem.replace("block_sparse_moe", "mlp").rsplit(".", 2)
        if matrix in ("down_proj", "w2"):
            weights[f"{experts}.down_proj"][int(number)] += added
        else:
            gate, up = weights[f"{experts}.gate_up_proj"][int(number)].chunk(2)
            (gate if matrix in ("gate_proj", "w1") else up).add_(added)
    return merged


def in_peft(model: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")  # PEFT applies them all the same
        warnings.filterwarnings("error", message=".*adapter keys.*")
        warnings.filterwarnings("error", message=".*target_(modules|parameters).*")
        return PeftModel.from_pretrained(copy.deepcopy(model), str(folder))


def read_all(folder: Path, family: Family, shape: ModelShape) -> dict[str, Tensor]:
    sizes = family.hf_tensors(shape)
    adapter.check(folder, LoraConfig(rank=RANK, alpha=ALPHA), sizes)
    read = adapter.read(folder)
    return {name: read(whole(name, size)) for name, size in sizes.items()}


def check_adapter(model: Any, tensors: dict[str, Tensor], targets: tuple[str, ...], folder: Path) -> None:
    """Write an adapter. PEFT must compute what the oracle computes, and a run must read what was written."""
    family, shape = family_for(model, targets)
    adapter.write(folder, tensors, LoraConfig(rank=RANK, alpha=ALPHA, targets=targets), family, folder / "base")
    before, wanted, found = (one(TOKENS).logits for one in (model, merge(model, tensors), in_peft(model, folder)))
    effect = float((wanted - before).abs().max())
    assert effect > 0.1 and float((found - wanted).abs().max()) < 1e-4 * effect
    read = read_all(folder, family, shape)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_peft_computes_every_part_of_an_adapter(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    everything = random_tensors(*family_for(model, ("all-linear",)), seed=1)
    for is_in in PARTS.values():
        if any(map(is_in, everything)):
            tensors = {name: tensor if is_in(name) else 0 * tensor for name, tensor in everything.items()}
            check_adapter(model, tensors, ("all-linear",), tmp_path / "adapter")


FAST = "qwen3_moe", "glm4_moe", "qwen3_5_moe_text"


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in MODELS
            if name not in (*FAST, *FAMILIES, "qwen3 tied", "multimodal qwen3_5_text")
        ),
    ],
)
def test_peft_computes_an_adapter_of_some_matrices_of_experts(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    names = {"gate": "w1", "up": "w3", "down": "w2"} if name == "mixtral" else {}
    for some in (("gate", "up"), ("gate",), ("up", "o"), ("down",), ("up", "down")):
        targets = tuple(names.get(target, target) for target in some)
        tensors = random_tensors(*family_for(model, targets), seed=2)
        check_adapter(model, tensors, targets, tmp_path / "-".join(some))


@torch.no_grad()
def test_stacks_that_peft_saved_are_read_unless_gate_and_up_mix(tmp_path: Path) -> None:
    model = MODELS["qwen3_5_moe_text"]()
    family, shape = family_for(model, ("all-linear",))
    written = random_tensors(family, shape, seed=3)
    adapter.write(tmp_path / "adapter", written, LoraConfig(rank=RANK, alpha=ALPHA), family, tmp_path / "base")
    loaded = in_peft(model, tmp_path / "adapter")
    loaded.save_pretrained(tmp_path / "again")
    read = read_all(tmp_path / "again", family, shape)
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    stack = next(p for n, p in loaded.named_parameters() if "layers.2.mlp.experts.base_layer.lora_B" in n)
    stack[-1, 0] = 0.1  # up's last row, in gate's columns
    loaded.save_pretrained(tmp_path / "mixed")
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.experts\.base_layer\.lora_B\.weight "):
        read_all(tmp_path / "mixed", family, shape)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe", "qwen3_5_moe_text"])
def test_an_adapter_of_experts_that_peft_made_is_refused(name: str, tmp_path: Path) -> None:
    """Gate and up share an A there."""
    model = MODELS[name]()
    config = PeftConfig(r=RANK, lora_alpha=ALPHA, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)
    targets = ("w1", "w2", "w3") if name == "mixtral" else ("gate", "up", "down")
    with pytest.raises(ConfigError, match=r"lora_A\.weight has shape"):
        read_all(tmp_path, *family_for(model, targets))


NEUTRAL = {  # PEFT's fields with another value, which loads the same numbers on the same base
    "auto_mapping": {"base_model_class": "Qwen2ForCausalLM"},
    "base_model_name_or_path": "org/base",
    "ensure_weight_tying": True,
    "eva_config": {"rho": 3.0},
    "exclude_modules": ["lm_head"],
    "inference_mode": False,
    "layers_pattern": "layers",
    "init_lora_weights": "gaussian",
    "megatron_core": "megatron.other",
    "peft_version": "0.99",
    "qalora_group_size": 8,
    "revision": "main",
    "runtime_config": {"ephemeral_gpu_offload": True},
    "target_modules": ".*(q|o)_proj",
    "target_parameters": ["q_proj.weight"],
    "task_type": "FEATURE_EXTRACTION",
}
CHECKED = {"r": 4, "lora_alpha": 9}  # compared with model.lora
VALUES: dict[str, list[Any]] = {
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", "new"],
    "peft_type": ["LOHA", None],
    "bias": ["all", "lora_only"],
    "rank_pattern": [{"q_proj": 6}, {"experts.gate_up_proj": 5}],
    "alpha_pattern": [{"q_proj": 7.0}, {"experts.gate_up_proj": 7.0}],
    "layers_to_transform": [0, [0]],
    "lora_dropout": [0.1],
    "field_of_2027": ["on", True, 3, {"key": 0}],
}


def test_a_field_is_refused_unless_it_is_known_to_change_nothing(tmp_path: Path) -> None:
    model = make_model("qwen2")
    family, shape = family_for(model, ("q", "o"))
    lora, sizes = LoraConfig(rank=RANK, alpha=ALPHA), family.hf_tensors(shape)
    config = PeftConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path)
    adapter.check(tmp_path, lora, sizes)  # all fields of this PEFT with its defaults
    path = tmp_path / "adapter_config.json"
    saved = json.loads(path.read_text())

    def refusal(**fields: Any) -> str:
        path.write_text(json.dumps(saved | fields))
        try:
            adapter.check(tmp_path, lora, sizes)
        except ConfigError as error:
            return str(error)
        return ""

    assert [name for name, value in NEUTRAL.items() if refusal(**{name: value})] == []
    assert [value for value in (False, None, "eva", "orthogonal") if refusal(init_lora_weights=value)] == []
    assert not refusal(field_of_2027=None) and not refusal(layers_to_transform=None, use_dora=None)
    for name in {*saved, *VALUES} - {*NEUTRAL, *CHECKED} | {"init_lora_weights"}:
        for value in VALUES.get(name, [True, {"key": 1}, ["word"], 3]):
            assert f" {name}={value!r} " in refusal(**{name: value}), (name, value)
    for name, value in CHECKED.items():
        assert f" {name}={value} is not model.lora" in refusal(**{name: value})
    assert len(refusal(layer_replication=[[i, i + 1] for i in range(999)])) < 400


@torch.no_grad()
@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", "pissa", "olora"])
def test_an_adapter_is_read_with_pefts_numbers_or_refused(init: Any, tmp_path: Path) -> None:
    """PiSSA and OLoRA change the base when PEFT loads the adapter."""
    torch.manual_seed(0)
    model = make_model("qwen2")
    names, rank = ["q_proj", "o_proj"], 4
    config = PeftConfig(r=rank, lora_alpha=8, target_modules=names, init_lora_weights=init, task_type="CAUSAL_LM")
    theirs = get_peft_model(copy.deepcopy(model), config)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    shape = ModelShape.from_hf_config(model.config.to_dict())
    sizes = adapter_family(family_of("qwen2"), shape, rank, ("q", "o")).hf_tensors(shape)
    if init in ("pissa", "olora"):
        with pytest.raises(ConfigError, match=f"init_lora_weights='{init}' .*; merge it"):
            adapter.check(tmp_path, LoraConfig(rank=rank, alpha=8), sizes)
        return
    adapter.check(tmp_path, LoraConfig(rank=rank, alpha=8), sizes)
    read = adapter.read(tmp_path)
    tensors = {name: read(whole(name, size)) for name, size in sizes.items()}
    wanted, found = theirs(TOKENS).logits, merge(model, tensors, 8 / rank)(TOKENS).logits
    assert float((found - wanted).abs().max()) < 1e-4 * float((wanted - model(TOKENS).logits).abs().max())
