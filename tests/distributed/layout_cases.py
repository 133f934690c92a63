"""Cases of the layout tests for their ranks, in addition to the cases of grpo_mega.cli.commands.check."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from grpo_mega import config as configs
from grpo_mega.cli.commands.check import Case
from grpo_mega.config import Config, RouterConfig
from grpo_mega.types import Group, Prompt, Routes, Sample
from tests.helpers import models
from tests.helpers.models import VOCAB_SIZE

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
}

# Eight layers for pp=4 with vpp=2; two key-value heads, fewer than tp=4; the vocabulary of 102 does not divide by 4.
MODELS = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "tied": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "short": ("qwen2", {"num_hidden_layers": 2}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    # The gradient of A_log is a sum of terms that cancel: with seed 5, fp32 of transformers differs from fp64 by 1e-5.
    "qwen3_5": ("qwen3_5_text", {"seed": 4}),
    "uneven": ("llama", {"num_hidden_layers": 6, "tied": True}),
    "large": ("qwen3", {"num_hidden_layers": 4, "vocab_size": 111, "hidden_size": 40}),
}
MIXTURES = {
    "mixtral": ("mixtral", {"num_hidden_layers": 4}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 4, "norm_topk_prob": True}),
    "qwen3_moe-unnormalised": ("qwen3_moe", {"num_hidden_layers": 4, "norm_topk_prob": False, "tied": True}),
    "deepseek_v2": ("deepseek_v2", {"num_hidden_layers": 5, "rope_parameters": YARN_ROPE | {"factor": 4.0}}),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 5, "q_lora_rank": 10, "rope_parameters": YARN_ROPE}),
    "glm4_moe": ("glm4_moe", {"num_hidden_layers": 4}),
    "glm4_moe-normed": ("glm4_moe", {"num_hidden_layers": 5, "use_qk_norm": True, "n_group": 1, "topk_group": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {"num_hidden_layers": 3}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"num_hidden_layers": 5}),
    "qwen3_5_moe-tied": ("qwen3_5_moe_text", {"seed": 4, "num_hidden_layers": 4, "num_experts": 5, "tied": True}),
    "deepseek_v3-plain": (
        "deepseek_v3",
        {"num_hidden_layers": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    ),
    # Each token of these models goes to given experts.
    "qwen3_moe-routed": ("qwen3_moe", {"num_hidden_layers": 8, "norm_topk_prob": True}),
    "deepseek_v3-routed": ("deepseek_v3", {"num_hidden_layers": 5}),
    "qwen3_5_moe-routed": ("qwen3_5_moe_text", {"num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 3}),
}
for _models, _classes in ((MODELS, models.CLASSES), (MIXTURES, models.MIXTURES)):
    _models |= {name: (name, {}) for name in _classes if all(name != model[0] for model in _models.values())}

# Methods on a short qwen2, as config changes. Together they cover every loss, advantage and kind of correction.
METHODS = {
    "dual_clip": (
        "algorithm.loss_type=dual_clip",
        "algorithm.use_valid_token_scale=true",
        "algorithm.loss_agg_func=token-mean",
    ),
    "gspo": ("algorithm.recipe=gspo", "algorithm.correction={importance: sequence, veto_below: 0.1}"),
    "gspo_token": ("algorithm.recipe=gspo_token", "algorithm.adv_type=grpo_process"),
    "cispo": (
        "algorithm.recipe=cispo",
        "algorithm.correction={importance: token, mask: token, mask_low: 0.3, mask_high: 3.0}",
    ),
    "sapo": ("algorithm.recipe=sapo", "algorithm.correction={mask: geometric, mask_low: 0.7, mask_high: 1.4}"),
    "gmpo": ("algorithm.recipe=gmpo", "algorithm.correction={mask: sequence, mask_low: 0.05, mask_high: 20.0}"),
    "rloo": (
        "algorithm.recipe=rloo",
        "algorithm.loss_type=reinforce",
        "algorithm.correction={importance: icepop, mask_low: 0.8, mask_high: 1.25}",
    ),
    "reinforce_plus_plus": ("algorithm.recipe=reinforce_plus_plus", "algorithm.kl_beta=0.1"),
    "reinforce_plus_plus_baseline": ("algorithm.recipe=reinforce_plus_plus_baseline", "algorithm.overlong_buffer=0.3"),
    "process_supervision": ("algorithm.recipe=process_supervision", "algorithm.overlong_filter=true"),
    "clip_cov": (
        (
            "algorithm={recipe: clip_cov, adv_type: grpo_turn, group_size: 4, cov_share: 1.0, cov_low: 0.02, cov_high:"
            " 0.5}"
        ),
        "algorithm.correction={importance: token, batch_normalize: true, reject: seq_max_k3, reject_above: 2.0}",
    ),
    "kl_cov": (
        (
            "algorithm={recipe: kl_cov, adv_type: opo, group_size: 4, cov_share: 0.2, positive_nll: 0.1,"
            " positive_above: 0.5}"
        ),
        "algorithm.correction={importance: sequence, batch_normalize: true, off_policy_threshold: 0.01}",
    ),
    "opd": ("algorithm.recipe=opd", "teachers={main: {path: FOLDER/uneven}}"),
    "opd_kl": (
        "algorithm={recipe: opd, group_size: 4, adv_type: grpo, distill_kl: reverse}",
        "teachers={main: {path: FOLDER/large}}",
    ),
}


LOGITS_LAYOUTS = (
    "tp=1",
    "tp=2,dp=2,sequence_parallel=true",
    "pp=2,dp=2",
    "tp=2,pp=2",
    "pp=4,vpp=2",
    "tp=4",
    "cp=4",
)
HYBRID_LAYOUTS = ("tp=1", "tp=2,sequence_parallel=true", "tp=2,pp=2", "pp=2,dp=2", "pp=4,vpp=2")
MIXTURES_LAYOUTS = (
    "tp=1",
    "ep=2",
    "ep=4",
    "dp=4,ep=2",
    "tp=2,ep=2,sequence_parallel=true",
    "tp=2,etp=2,ep=2,sequence_parallel=true",
    "tp=4,etp=2,sequence_parallel=true",
    "pp=2,ep=2",
    "pp=2,vpp=2,ep=2",
)
HYBRID_MOE_LAYOUTS = ("tp=1", "tp=2,sequence_parallel=true", "pp=2", "ep=2", "tp=2,ep=2,sequence_parallel=true")
ROUTED_LAYOUTS = (
    "tp=1",
    "tp=1 model.recompute=full batch.tokens_per_micro_batch=40",
    "tp=2,sequence_parallel=true model.recompute=selective",
    "pp=2",
    "ep=2",
    "pp=4,vpp=2 batch.tokens_per_micro_batch=40 model.recompute=full",
    "tp=2,ep=2,sequence_parallel=true",
    "cp=2,tp=2,ep=2,sequence_parallel=true model.recompute=full",
)


@dataclass(frozen=True)
class LogitsCase:
    name: str
    config: Config
    sequences: list[list[int]]
    expected: list[torch.Tensor]  # per sequence: [length, vocab] fp32
    probes: list[torch.Tensor] = field(default_factory=list)  # per sequence; loss = hidden * probe; empty: no backward
    # Fp64 gradients of that loss, keyed by checkpoint names.
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    routes: list[Routes] = field(default_factory=list)  # per sequence; empty: the model's routers choose
    loads: list[list[int]] = field(default_factory=list)  # tokens per expert, by layer
    balance: dict[str, float] = field(default_factory=dict)  # metrics of the router losses
    token_budget: int = 64  # tokens of a micro-batch

    @property
    def world_size(self) -> int:
        return self.config.layout.world_size


def label(case: LogitsCase | Case) -> str:
    """Return a name that is unique among cases of both kinds."""
    return f"{'logits' if isinstance(case, LogitsCase) else 'update'} {case.name}"


def as_samples(sequences: list[list[int]]) -> list[Sample]:
    """Return samples whose response is all but the first token of a sequence."""
    samples = [
        Sample(Prompt(i, "", (tokens[0],), ""), 0, tokens[1:], [0.0] * (len(tokens) - 1), "stop", reward=1.0)
        for i, tokens in enumerate(sequences)
    ]
    for sample in samples:
        sample.advantages = torch.zeros(sample.response_len)
    return samples


class Routed:
    """Records the router logits and the selected experts of a transformers model, per layer and sequence."""

    def __init__(self, num_layers: int) -> None:
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]  # [tokens, experts]
        self.chosen: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]  # [tokens, chosen]
        self.num_experts = 0

    def loads(self) -> list[list[int]]:
        return [torch.cat(c).flatten().bincount(minlength=self.num_experts).tolist() if c else [] for c in self.chosen]


@contextmanager
def routed(model: Any) -> Iterator[Routed]:
    """Record the routers of the model inside the context, one sequence after another."""
    found, handles = Routed(len(model.model.layers)), []
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            gate = layer.mlp.gate
            found.num_experts = gate.weight.shape[0]
            into = lambda _, args, i=i, gate=gate: found.logits[i].append(args[0].flatten(0, -2) @ gate.weight.t())  # noqa: E731
            handles.append(layer.mlp.register_forward_pre_hook(into))
            handles.append(
                layer.mlp.experts.register_forward_pre_hook(lambda _, args, i=i: found.chosen[i].append(args[1]))
            )
    yield found
    for handle in handles:
        handle.remove()


class InDouble(TorchFunctionMode):
    """Compute in fp64 where a model asks for fp32. transformers computes linear attention and norms in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = [torch.float64 if one is torch.float32 else one for one in args]
        return func(*given, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def router_losses(
    found: Routed, config: RouterConfig, micro_batches: Sequence[Sequence[int]], topk: int, is_sigmoid: bool
) -> Any:
    """Return the balancing loss and the z loss of each layer with experts: tensors [layers]."""
    balancing, z_losses = [], []
    for logits in filter(None, found.logits):
        num_tokens = sum(map(len, logits))
        z_losses.append(torch.cat(logits).logsumexp(-1).square().mean())
        is_by_sample = config.balancing == "seq_aux_loss"
        parts = [[i] for i in range(len(logits))] if is_by_sample else micro_batches
        loss = torch.zeros((), dtype=torch.float64)
        for part in parts:
            own = torch.cat([logits[i] for i in part])
            scores = own.sigmoid() / own.sigmoid().sum(-1, keepdim=True) if is_sigmoid else own.softmax(-1)
            f = scores.topk(topk).indices.flatten().bincount(minlength=found.num_experts) / (topk * len(own))
            weight = 1 / len(logits) if is_by_sample else len(own) / num_tokens
            loss = loss + weight * found.num_experts * (f * scores.mean(0)).sum()
        balancing.append(loss)
    return tuple(torch.stack(losses) if losses else torch.zeros(0) for losses in (balancing, z_losses))


def probe(
    model: Any, sequences: list[list[int]], folder: Path, config: RouterConfig, micro_batches: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return random probes and the gradients of sum(hidden * probe); transformers saves the gradients under checkpoint
    names.

    The loss includes the router losses. aux_loss is valid only for a layout with these micro-batches.
    """
    generator = torch.Generator().manual_seed(6)
    probes = [0.05 * torch.randn(len(tokens), model.config.hidden_size, generator=generator) for tokens in sequences]
    model.config._experts_implementation = "eager"  # other implementations do not support fp64
    model = model.double().requires_grad_(True)
    with routed(model) as found, InDouble() if model.config.model_type.startswith("qwen3_5") else nullcontext():
        hidden = [model.model(torch.tensor([tokens])).last_hidden_state[0] for tokens in sequences]
    is_sigmoid, topk = model.config.model_type == "deepseek_v3", getattr(model.config, "num_experts_per_tok", 0)
    balancing, z_losses = router_losses(found, config, micro_batches, topk, is_sigmoid)
    loss = sum((h * p).sum() for h, p in zip(hidden, probes, strict=True))
    (loss + config.aux_loss_coeff * balancing.sum() + config.z_loss_coeff * z_losses.sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    gradients = load_file(folder / "model.safetensors")
    assert all(
        gradient.any() for name, gradient in gradients.items() if "lm_head" not in name and ".experts." not in name
    )
    metrics = {"moe/aux_loss": float(balancing.detach().mean()) if config.aux_loss_coeff else 0.0}
    metrics |= {"moe/z_loss": float(z_losses.detach().mean()) if config.z_loss_coeff else 0.0}
    balance = {name: value for name, value in metrics.items() if value}
    return {"probes": probes, "gradients": gradients, "loads": found.loads(), "balance": balance}


def make_config(model: Path, layout: str, *overrides: str) -> configs.Config:
    raw = {
        "run_dir": "unused",
        "steps": 1,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "unused", "max_prompt_length": 12},
        "rollout": {"max_response_length": 24, "temperature": 0.8},
        "algorithm": {"group_size": 4, "kl_beta": 0.02, "calculate_entropy": True, "entropy_bonus": 0.01},
        "batch": {"prompts_per_step": 6, "epochs": 3, "tokens_per_micro_batch": 128},
        # eps is above the rounding of gradients. Otherwise Adam would turn a gradient of pure rounding into a full
        # step.
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6},
    }
    for part in layout.split(","):
        configs.apply_override(raw, f"layout.{part.replace(';', ',')}")
    for override in overrides:
        configs.apply_override(raw, override)
    return configs.validate(raw)


def make_sequences(name: str = "") -> list[list[int]]:
    generator, lengths = torch.Generator().manual_seed(5), (5, 17, 2, 30, 11, 24, 9)
    if name.startswith("qwen3_5"):  # linear attention computes chunks of 64 tokens
        lengths = (1, 63, 64, 65, 129, 2, 30)
    return [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def random_groups(seed: int) -> list[Group]:
    """Return six groups of four samples of different lengths. In one group all rewards are equal; one sample has no
    reward.
    """
    generator = torch.Generator().manual_seed(seed)

    def ints(n: int) -> list[int]:
        return torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist()

    groups = []
    for g in range(6):
        prompt = Prompt(g, "", tuple(ints(3 + g)), "")
        samples = []
        for i in range(4):
            length = int(torch.randint(1, 24, (1,), generator=generator))
            logprobs = (
                -5.3 + 0.3 * torch.randn(length, generator=generator)
            ).tolist()  # near the log-probs of a random model
            reward = 1.0 if g == 2 else float(torch.rand(1, generator=generator))
            sample = Sample(prompt, i, ints(length), logprobs, "stop" if length < 20 else "length", 0)
            if not g == i == 1:
                sample.reward = reward
                sample.step_ends = sorted({length // 3, length - 1})
                sample.step_rewards = torch.rand(len(sample.step_ends), generator=generator).tolist()
            samples.append(sample)
        groups.append(Group(prompt, samples))
    return groups
