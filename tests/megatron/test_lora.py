"""LoRA against PEFT on transformers' models, in every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.checkpoint_io import adapter
from grpo_mega.checkpoint_io.model import read_model_files
from grpo_mega.config import LoraConfig
from grpo_mega.distributed.launch import only_rank
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.precision import DTYPES
from grpo_mega.weights.boxes import region
from grpo_mega.weights.derived import adapter_family
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.distributed.layout_cases import as_samples
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.ranks import launch
from tests.megatron.lora_worker import ALPHA, CASES, RANK, config_of

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen3-few": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
}


def new_adapter(model: Any, targets: str) -> tuple[LoraConfig, Any, ModelShape, dict[str, torch.Tensor]]:
    """Return random A and B in float64, by their Hugging Face names."""
    chosen = (
        ("all-linear",) if targets == "all" else tuple(targets.removeprefix("targets=[").removesuffix("]").split(","))
    )
    lora, shape = LoraConfig(rank=RANK, alpha=ALPHA, targets=chosen), ModelShape.from_hf_config(model.config.to_dict())
    family = adapter_family(family_of(shape.model_type), shape, RANK, chosen)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(size, generator=generator).double() * 0.1 for name, size in family.hf_tensors(shape).items()
    }
    return lora, family, shape, tensors


def merged_weights(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of transformers' model plus alpha / rank B A, also where transformers stacks its experts."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name in [n for n in tensors if n.endswith("lora_A.weight")]:
        stem = name.removesuffix("lora_A.weight")
        added = ALPHA / RANK * tensors[stem + "lora_B.weight"] @ tensors[name]
        if stem + "weight" in weights:
            weights[stem + "weight"] = weights[stem + "weight"] + added
            continue
        block, _, rest = stem.partition(".experts.")
        number, part, _ = rest.split(".")
        stacked = f"{block}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
        whole = torch.zeros_like(weights[stacked])
        rows = (
            slice(None)
            if part == "down_proj"
            else slice(0, len(added))
            if part == "gate_proj"
            else slice(len(added), None)
        )
        index = torch.zeros(len(whole), dtype=added.dtype)
        index[int(number)] = 1
        wide = torch.nn.functional.pad(added, (0, 0, rows.start or 0, len(whole[0]) - (rows.start or 0) - len(added)))
        weights[stacked] = weights[stacked] + index[:, None, None] * wide
    return weights


def expected_gradients(
    model: Any, sequences: list[list[int]], probes: list[torch.Tensor], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    weights = {n.removeprefix("model."): w for n, w in merged_weights(model, leaves).items() if n != "lm_head.weight"}
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, probe in zip(sequences, probes, strict=True):
        out = torch.func.functional_call(model.model, weights, (torch.tensor([tokens]),)).last_hidden_state[0]
        loss = loss + (out * probe).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with each model, its adapters, and the gradients that transformers computes."""
    folder = tmp_path_factory.mktemp("lora")
    for name, (kind, changes) in MODELS.items():
        model = make_model(kind, initializer_range=0.06, **changes)
        save_checkpoint(model, folder / name)
        model = model.double()
        model.config._experts_implementation = "eager"  # torch.grouped_mm has no float64
        generator = torch.Generator().manual_seed(3)
        sequences = [torch.randint(2, 102, (n,), generator=generator).tolist() for n in (9, 17, 4, 23, 12)]
        probes = [torch.randn(len(s), model.config.hidden_size, generator=generator).double() for s in sequences]
        case: dict[Any, Any] = {"sequences": sequences, "probes": probes}
        texts = [text for cases in CASES.values() for text in cases[name]]
        for targets in {next((w for w in text.split() if w.startswith("targets")), "all") for text in texts}:
            lora, family, _, tensors = new_adapter(model, targets)
            adapter.write(
                folder / f"{name}-{targets}", {n: t.float() for n, t in tensors.items()}, lora, family, folder / name
            )
            case["gradients", targets] = expected_gradients(model, sequences, probes, tensors)
        torch.save(case, folder / f"{name}.pt")
    return folder


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_adapters_equal_transformers_in_every_layout(world_size: int, models: Path) -> None:
    found = launch(Path(__file__).with_name("lora_worker.py"), world_size, models)
    wrong = [f"{name}: {error}" for name, errors in found.items() for error in errors]
    assert len(found) >= sum(map(len, CASES[world_size].values())) and not wrong, "\n".join(wrong)


def test_one_rank_equals_peft_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft
    from transformers.models.llama import modeling_llama

    monkeypatch.setitem(DTYPES, "float32", torch.float64)
    # transformers' norms compute in float32 for any dtype.
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm,
        "forward",
        lambda self, x: torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon),
    )
    model = make_model("llama")
    save_checkpoint(model, tmp_path / "base")
    lora, family, _, tensors = new_adapter(model, "all")
    adapter.write(tmp_path / "adapter", tensors, lora, family, tmp_path / "base")
    oracle = peft.PeftModel.from_pretrained(model.double(), tmp_path / "adapter", is_trainable=True).double()
    tokens, probe = torch.arange(3, 22), torch.randn(19, 32, dtype=torch.float64)
    hidden = oracle.base_model.model.model(tokens[None]).last_hidden_state[0]
    (hidden * probe).sum().backward()
    config = config_of("base", "tp=1", tmp_path)
    with only_rank():
        runtime = runtimes.arrange(config, runtimes.join(config))
        files = read_model_files(config.model)
        policy = Policy(config, files.shape, files.family, files.hf_config, runtime)  # Adam refuses float64
        files.read_weights(partial(policy.load_weights, read_adapter=adapter.read(tmp_path / "adapter")))
        batch = pack_mini_batches([as_samples([tokens.tolist()])], [[1.0]], policy.packing)[0][0]
        params = policy.pipeline.packed_seq_params_of(batch)
        out = policy.models[0](batch.tokens[None], batch.position_ids[None], None, packed_seq_params=params)[
            0, : len(tokens)
        ]
        gradients = torch.autograd.grad((out * probe).sum(), list(policy.lora.parameters.values()))
        runtimes.stop()
    assert float((out - hidden).abs().max() / hidden.abs().max()) < 1e-9
    shards, theirs = policy.lora.shards.rank_shards(0), dict(oracle.named_parameters())
    for name, gradient in zip(policy.lora.parameters, gradients, strict=True):
        for piece in shards[name].pieces:
            stem = f"base_model.model.{piece.box.tensor.removesuffix('.weight')}.default.weight"
            expected = theirs[stem].grad[region(piece.box.start, piece.box.shape)]
            found = gradient[region(piece.offset, piece.box.shape)]
            assert float((found - expected).abs().max()) <= 1e-9 * float(theirs[stem].grad.abs().max()), stem
