"""Losses and gradients of multi-turn batches equal an oracle's for every recipe, in every layout and packing.

The oracle computes each sampled token alone, from its full prefix, with transformers in float64. It never sees inserted
tokens: its responses are lists of sampled tokens. The oracles of tools/conformance write out advantages and losses. All
layouts share one launch of two ranks. A recipe runs in all layouts only with --sweep.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mega import config as configs
from grpo_mega.config.aliases import RECIPES as ALL_RECIPES
from grpo_mega.types import Context, Group, Prompt, Sample, Span
from tests.distributed.conversations_worker import Layout
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.ranks import Results, launch
from tests.megatron.test_replay import RECIPES as STRICT_RECIPES
from tools.conformance import oracle_advantages, oracle_losses

pytestmark = pytest.mark.distributed

TEMPERATURE, LONGEST = 0.9, 40
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "initializer_range": 0.04,
    "layer_types": ["full_attention"] * 4,
}
# test_replay.py sets keys that reach both sides of each recipe's limits with few tokens. sft has a separate test.
RECIPES: dict[str, dict[str, Any]] = {name: {} for name in ALL_RECIPES if name != "sft"} | STRICT_RECIPES
RECIPES |= {"dapo filtered": {"overlong_filter": True}, "kl_cov": {"cov_share": 0.2, "positive_nll": 0.1}}
LAYOUTS = (
    "dp=2 batch.tokens_per_micro_batch=90",
    "dp=2 batch.tokens_per_micro_batch=900",
    "dp=2 batch.tokens_per_micro_batch=120 batch.share_prompts=true",
    "cp=2 batch.tokens_per_micro_batch=60",
    "tp=2,sequence_parallel=true batch.tokens_per_micro_batch=90",
    "pp=2,layers_per_chunk=[3,1] batch.tokens_per_micro_batch=140",
    "pp=2,vpp=2 batch.tokens_per_micro_batch=70",
)

# Recipes that run in every layout: means over a response, its log-probs before the update, and a teacher's vocabulary.
EVERYWHERE = ("grpo", "gspo", "reinforce_plus_plus", "opd reverse")

# The segments of each sample. A segment is the length of its context (0: the prompt is its context), and the lengths of
# its runs of tokens. Sampled and inserted runs alternate. If the first run has length 0, inserted tokens come first.
CONVERSATIONS: list[list[list[tuple[int, list[int]]]]] = [
    [[(0, [7])], [(0, [3, 4, 5])], [(0, [2, 6, 1, 1, 3])]],
    [[(0, [4, 3, 2]), (11, [3, 2, 4])], [(9, [5])], [(0, [3]), (8, [2]), (13, [1, 5, 6])]],
    [[(5, [0, 2, 9]), (7, [0, 1, 3])], [(0, [2, 9])], [(0, [6, 1, 7, 2])]],
    [[(0, [1]), (6, [1])], [(0, [8, 14, 9])], [(0, [5, 3, 4, 2, 3])]],
]


@dataclass
class Token:
    """A sampled token: its full prefix, and its index in the response."""

    prefix: list[int]
    token: int
    index: int


@dataclass
class Values:
    """Log-probs [N] of all sampled tokens, and the log-probs of the vocabulary [N, V] at their positions."""

    logprobs: Tensor
    table: Tensor


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Results, dict[str, float]]:
    """Return the folder of the results, the errors of the layouts, and the expected losses by recipe."""
    folder = tmp_path_factory.mktemp("conversations")
    start = make_model("qwen2", seed=3, tied=True, **SIZES)
    models = {"reference": start, "before": moved(start, 1), "now": moved(start, 2)}
    models["teacher"] = make_model("qwen3", seed=5, **SIZES | {"initializer_range": 0.15, "layer_types": None})
    for name, model in models.items():
        save_checkpoint(model, folder / name)
    groups, tokens = make_groups()
    values = {name: evaluated(model, tokens) for name, model in models.items()}
    set_rollout_logprobs(groups, tokens, values["before"])
    torch.save(groups, folder / "groups.pt")
    losses, gradients = {}, {}
    parameters = dict(models["now"].named_parameters())
    for recipe, own in RECIPES.items():
        loss = expected_loss(config_of(folder, LAYOUTS[0], recipe, own), groups, tokens, values)
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        losses[recipe], gradients[recipe] = loss.item(), dict(zip(parameters, found, strict=True))
    layouts = {}
    for text, recipes in recipes_of_layouts(request.config).items():
        of_recipes = {recipe: config_of(folder, text, recipe, RECIPES[recipe]) for recipe in recipes}
        layouts[text] = Layout(config_of(folder, text, "opd", {"kl_beta": 0.1, "distill_kl": "reverse"}), of_recipes)
    torch.save((layouts, gradients), folder / "cases.pt")
    return folder, launch(Path(__file__).with_name("conversations_worker.py"), 2, folder), losses


def recipes_of_layouts(config: pytest.Config) -> dict[str, list[str]]:
    """Return the recipes that run in each layout: all with --sweep. Otherwise a recipe runs in one of three layouts, or
    with --all in three of seven.
    """
    is_sweep, is_all = (bool(config.getoption(name)) for name in ("--sweep", "--all"))
    layouts = LAYOUTS if is_all or is_sweep else LAYOUTS[2::2]
    num_layouts = len(LAYOUTS) if is_sweep else 3 if is_all else 1
    return {
        text: [
            recipe
            for i, recipe in enumerate(RECIPES)
            if recipe in EVERYWHERE or (number - i) % len(layouts) < num_layouts
        ]
        for number, text in enumerate(layouts)
    }


def moved(model: Any, seed: int) -> Any:
    """Return the model with other weights, near its own."""
    generator, result = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for p in result.parameters():
            p += 0.01 * torch.randn(p.shape, generator=generator)
    return result


def make_groups() -> tuple[list[Group], list[list[Token]]]:
    """Return the groups, and the sampled tokens of all samples in order."""
    generator = torch.Generator().manual_seed(8)

    def ints(n: int) -> list[int]:
        return torch.randint(2, SIZES["vocab_size"], (n,), generator=generator).tolist()

    groups, tokens = [], []
    for g, of_group in enumerate(CONVERSATIONS):
        prompt = Prompt(g, "", tuple(ints(1 if g == 3 else 3 + g)), "")
        samples = []
        for i, segments in enumerate(of_group):
            response: list[int] = []
            sample = Sample(prompt, i, response, [], "stop", messages=[])
            mine, turns, contexts = [], [], []
            for context_len, runs in segments:
                prefix = list(prompt.token_ids)
                if context_len:
                    prefix = ints(context_len)
                    contexts.append(Context(len(response), tuple(prefix)))
                for number, length in enumerate(runs):
                    if number % 2 == 0 and length:
                        turns.append((len(response), len(response) + length))
                    for token in ints(length):
                        if number % 2 == 0:
                            mine.append(Token(list(prefix), token, len(response)))
                        prefix.append(token)
                        response.append(token)
            is_single = turns == [(0, len(response))]
            sample.sampled, sample.contexts = () if is_single else turns, contexts
            sample.spans = [Span(0, 0, len(response))]
            sample.finish_reason = ("stop", "turns", "deadline", "length")[(g + i) % 4]
            reward, score, *steps = torch.rand(5, generator=generator).tolist()
            sample.reward, sample.scores = reward, {"accuracy": float(reward > 0.5), "format": score}
            sample.step_ends = [end - 1 for _, end in turns][:3]
            sample.step_rewards = steps[: len(sample.step_ends)]
            samples.append(sample)
            tokens.append(mine)
        groups.append(Group(prompt, samples))
    unscored = groups[2].samples[1]
    unscored.reward, unscored.step_rewards, unscored.step_ends = None, [], []
    return groups, tokens


def set_rollout_logprobs(groups: list[Group], tokens: list[list[Token]], before: Values) -> None:
    generator = torch.Generator().manual_seed(9)
    noisy = iter((before.logprobs + 0.15 * torch.randn(len(before.logprobs), generator=generator)).tolist())
    for sample, mine in zip((s for g in groups for s in g.samples), tokens, strict=True):
        sample.rollout_logprobs = [0.0] * sample.response_len
        for token in mine:
            sample.rollout_logprobs[token.index] = next(noisy)


def evaluated(model: Any, tokens: list[list[Token]]) -> Values:
    """Compute each sampled token in a separate row, after its full prefix. Only padding follows."""
    flat = [token for mine in tokens for token in mine]
    rows = torch.zeros(len(flat), max(len(one.prefix) for one in flat), dtype=torch.int64)
    for row, one in zip(rows, flat, strict=True):
        row[: len(one.prefix)] = torch.tensor(one.prefix)
    logits = model.double().requires_grad_(True)(rows).logits
    last = logits[torch.arange(len(flat)), [len(one.prefix) - 1 for one in flat], : SIZES["vocab_size"]]
    table = (last / TEMPERATURE).log_softmax(-1)
    return Values(table.gather(1, torch.tensor([[one.token] for one in flat]))[:, 0], table)


def expected_loss(
    config: configs.Config, groups: list[Group], tokens: list[list[Token]], values: dict[str, Values]
) -> Tensor:
    flat = config.algorithm.model_dump()
    flat |= flat["correction"] | {"max_response_length": LONGEST}
    flat |= {name: flat[name] or flat["ratio_clip_eps"] for name in ("ratio_clip_eps_low", "ratio_clip_eps_high")}
    flat["reward_weights"] = {function.name: function.weight for function in config.rewards.functions}
    of_loss, of_advantages = (
        kind(**{f.name: flat[f.name] for f in fields(kind)})
        for kind in (oracle_losses.Settings, oracle_advantages.AdvantageSettings)
    )
    if flat["kl_in"] == "reward":
        of_loss = replace(of_loss, kl_beta=0.0)
    samples = [sample for group in groups for sample in group.samples]
    ends = torch.tensor([len(mine) for mine in tokens]).cumsum(0).tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    old, ref, teacher = (values[name].logprobs.tolist() for name in ("before", "reference", "teacher"))
    now, q = values["now"].table, values["teacher"].table.detach()
    entropy = -(now.exp() * now).sum(-1)
    kl = (now.exp() * (now - q)).sum(-1) if flat["distill_kl"] == "reverse" else (q.exp() * (q - now)).sum(-1)
    scored = []
    for sample, mine, part in zip(samples, tokens, parts, strict=True):
        # The limit of a response, and so its penalty, counts inserted tokens too.
        penalty = oracle_advantages.overlong_penalty(sample.response_len, of_advantages)
        at = [sum(token.index <= end for token in mine) - 1 for end in sample.step_ends]
        reward = None if sample.reward is None else sample.reward + penalty
        scored.append(
            oracle_advantages.Scored(len(mine), reward, sample.step_rewards, at, old[part], ref[part], sample.scores)
        )
    iterator = iter(scored)
    rows = oracle_advantages.advantages(
        [[next(iterator) for _ in group.samples] for group in groups], replace(of_advantages, overlong_buffer=0.0)
    )
    responses = []
    for sample, part, row in zip(samples, parts, [row for of_group in rows for row in of_group], strict=True):
        is_filtered = config.algorithm.overlong_filter and sample.finish_reason != "stop"
        if is_filtered or not (sample.is_scored or config.teachers):
            continue
        rollout = [value for start, end in sample.sampled for value in sample.rollout_logprobs[start:end]]
        of_teacher = (teacher[part], [*kl[part]]) if config.teachers else ()
        responses.append(
            oracle_losses.Response(
                [*values["now"].logprobs[part]],
                old[part],
                rollout or list(sample.rollout_logprobs),
                row,
                [1] * len(row),
                ref[part],
                [*entropy[part]],
                sample.reward,
                *of_teacher,
            )
        )
    return oracle_losses.minibatch_loss(responses, of_loss)


def config_of(folder: Path, text: str, recipe: str, own: dict[str, Any]) -> configs.Config:
    layout, *overrides = text.split()
    name = recipe.split()[0]
    raw: dict[str, Any] = {
        "run_dir": "unused",
        "steps": 1,
        "device": "cpu",
        "model": {"path": str(folder / "reference"), "dtype": "float32"},
        "data": {"train": "unused", "max_prompt_length": 12},
        "rollout": {"max_response_length": LONGEST, "temperature": TEMPERATURE},
        "rewards": {"functions": [{"name": "accuracy"}, {"name": "format", "weight": 0.5}]},
        "algorithm": {"kl_beta": 0.1, "entropy_bonus": 0.02} | {"recipe": name, "calculate_entropy": True} | own,
        "batch": {"prompts_per_step": len(CONVERSATIONS), "epochs": 2},
        "log": {"progress": False},
    }
    raw["algorithm"]["group_size"] = 3
    if name == "opd" or "distill_beta" in own:
        raw["teachers"] = {"main": {"path": str(folder / "teacher")}}
    for part in layout.split(",", layout.partition("[")[0].count(",")):
        configs.apply_override(raw, f"layout.{part}")
    for override in overrides:
        configs.apply_override(raw, override)
    return configs.validate(raw)


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradients_equal_those_of_each_token_alone(
    found: tuple[Path, Results, dict[str, float]], recipe: str
) -> None:
    folder, problems, losses = found
    assert len(problems) >= len(LAYOUTS) // 2
    num_compared = 0
    for layout, lines in problems.items():
        assert not lines, "\n".join(lines)
        values = torch.load(folder / f"{layout}.pt", weights_only=False)
        if recipe not in values:
            continue
        num_compared += 1
        metrics, differences = values[recipe]
        # Terms of about 1 nat cancel in some losses.
        assert metrics["loss/total"] == pytest.approx(losses[recipe], rel=2e-6, abs=2e-6), layout
        assert len(differences) > 22 and max(differences.values()) < 2e-6, (layout, differences)
    assert num_compared, "no layout runs the recipe"
