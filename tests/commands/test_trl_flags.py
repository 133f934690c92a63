"""From flags of TRL and open-r1 to a config: TRL's names and arithmetic, and one-line errors."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, ModelConfig, ScriptArguments

from grpo_mega import cli
from grpo_mega.cli.checks.violations import reward_problems
from grpo_mega.cli.commands import trl
from grpo_mega.cli.commands.options import RewardOptions, add_options, read_options
from grpo_mega.cli.commands.train import overrides_of
from grpo_mega.cli.commands.trl import FLAGS, NOTED, REFUSED, parse_flags
from grpo_mega.config import Config
from grpo_mega.errors import ConfigError

SEED = (
    "--model_name_or_path base --dataset_name math_dataset --reward_funcs accuracy format --output_dir output/grpo_math"
)
ROWS = [{"question": f"{n}+1=?", "answer": str(n + 1)} for n in range(100)]
# Our flags, open-r1's flags, and flags of older releases of TRL and transformers.
NOT_TRLS = {
    *(
        "tensor_parallel",
        "pipeline_parallel",
        "data_parallel",
        "sequence_parallel",
        "resume",
        "set",
        "dataset_answer_column",
    ),
    *("dataset_prompt_column", "system_prompt", "reward_funcs", "config"),
    *("max_prompt_length", "warmup_ratio", "use_peft", "dataset_streaming", "logging_first_step", "deepspeed", "fsdp"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working folder with a model folder and a dataset of 100 training rows and a test split."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text('{"model_type": "qwen2", "dtype": "float32"}')
    (tmp_path / "math_dataset").mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:4])):
        (tmp_path / f"math_dataset/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("grpo_mega.distributed.launch.run_ranks", None)  # ranks are never started
    return tmp_path


def read(flags: str = "", environ: dict[str, str] | None = None) -> Config:
    return trl.read_config(f"{SEED} {flags}".split(), environ or {})[0]


def test_the_seeds_command_is_a_complete_config() -> None:
    config = read()
    assert (config.model.path, config.run_dir) == (Path("base"), Path("output/grpo_math"))
    assert config.data.train[0].path == "math_dataset" and config.data.prompt_column is None
    assert [(f.name, f.weight) for f in config.rewards.functions] == [("accuracy", 1.0), ("format", 1.0)]
    assert config.steps == 100 // config.batch.prompts_per_step  # one epoch
    assert config.data.heldout is None and config.algorithm.group_size == 16


def test_own_functions_are_found_in_the_current_folder(folder: Path) -> None:
    (folder / "mine.py").write_text("def f(completions): return [0.0] * len(completions)\n")
    command = SEED.replace("accuracy format", "accuracy mine.f mine.py:f none.py:f")
    config, _, _ = trl.read_config(command.split(), {})
    assert config.code_dir is None
    (problem,) = reward_problems(config.rewards, config.code_dir)
    assert "'none.py:f': there is no file none.py" in problem


def test_dashes_and_equals_signs_are_accepted() -> None:
    dashes = (
        SEED.replace("model_name_or_path base", "model-name-or-path=base").replace("_", "-").replace("math-", "math_")
    )
    config, _, _ = trl.read_config(f"{dashes} --learning-rate=2e-6".replace("grpo-", "grpo_").split(), {})
    assert config == read("--learning_rate 2e-6")


TRLS = {field.name: field.default for field in fields(GRPOConfig)}
CASES: dict[str, dict[str, Any]] = {
    "--learning_rate 2e-6 --beta 0.04 --seed 5": {"optimizer.lr": 2e-6, "algorithm.kl_beta": 0.04, "seed": 5},
    "--num_generations 4 --max_prompt_length 99 --max_completion_length 7": {
        "algorithm.group_size": 4,
        "data.max_prompt_length": 99,
        "rollout.max_response_length": 7,
    },
    "--max_completion_length 32768": {"batch.tokens_per_micro_batch": 32768 + 1024},
    "--temperature 0.6 --top_p 1.0 --top_k 0 --min_p 0": {"rollout.temperature": 0.6, "rollout.top_p": 1},
    "--top_p 1 --top_k -1": {"rollout.top_p": 1, "rollout.top_k": 0},
    "--epsilon 0.1 --epsilon_high 0.3": {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3},
    "--epsilon 0.1": {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1},
    "--loss_type grpo": {"algorithm.loss_agg_func": "seq-mean-token-mean", "algorithm.loss_type": "actor"},
    "--loss_type dapo": {"algorithm.loss_agg_func": "token-mean", "algorithm.clip_high": 0.2},
    "--loss_type bnpo": {"algorithm.loss_agg_func": "token-mean"},
    "--loss_type dr_grpo --scale_rewards none": {
        "algorithm.loss_agg_func": "seq-mean-token-sum-norm",
        "algorithm.normalize_by_std": False,
    },
    # TRL limits the ratio: clamp(r, max=epsilon_high). Our limit is the distance from 1.
    "--loss_type cispo --epsilon_high 5": {
        "algorithm.loss_type": "cispo",
        "algorithm.loss_agg_func": "token-mean",
        "algorithm.clip_low": 1.0,
        "algorithm.clip_high": 4.0,
    },
    "--loss_type sapo --sapo_temperature_neg 1.2": {"algorithm.loss_type": "sapo", "algorithm.sapo_tau_negative": 1.2},
    "--importance_sampling_level sequence": {"algorithm.loss_type": "gspo"},
    "--delta 4": {"algorithm.loss_type": "dual_clip", "algorithm.ratio_clip_c": 4.0},
    "--use_bias_correction_kl --beta 0.1": {"algorithm.kl_penalty_type": "low_var_kl_weighted"},
    "--sync_ref_model --beta 0.1": {  # with TRL's defaults
        "algorithm.ref_model_sync_steps": TRLS["ref_model_sync_steps"],
        "algorithm.ref_model_mixup_alpha": TRLS["ref_model_mixup_alpha"],
    },
    "--sync_ref_model true --beta 0.1 --ref_model_sync_steps 7 --ref_model_mixup_alpha 1 --num_iterations 2": {
        "algorithm.ref_model_sync_steps": 4,
        "algorithm.ref_model_mixup_alpha": 1.0,
    },
    "--sync_ref_model false": {"algorithm.ref_model_sync_steps": None},
    "--entropy_coef 0.01": {"algorithm.entropy_bonus": 0.01, "algorithm.calculate_entropy": True},
    "--mask_truncated_completions": {"algorithm.overlong_filter": True},
    "--max_steps 12 --num_iterations 3 --save_steps 6 --save_total_limit 5": {
        "steps": 4,
        "batch.epochs": 3,
        "checkpoint.interval": 2,
        "checkpoint.keep": 5,
    },
    "--num_train_epochs 2.5": {"steps": 7},  # 250 prompts, 32 per step
    "--lr_scheduler_type cosine --warmup_ratio 0.1 --max_steps 50": {
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 5,
    },
    "--lr_scheduler_type constant_with_warmup --warmup_steps 7": {
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 7,
    },
    "--adam_beta2 0.99 --adam_epsilon 1e-6 --weight_decay 0.1 --max_grad_norm 0.2": {
        "optimizer.betas": (0.9, 0.99),
        "optimizer.eps": 1e-6,
        "optimizer.weight_decay": 0.1,
        "optimizer.clip_grad": 0.2,
    },
    "--bf16 false --gradient_checkpointing": {"model.dtype": "float32", "model.recompute": "full"},
    "--bf16": {"model.dtype": "bfloat16"},
    "--torch_dtype auto": {"model.dtype": "float32"},  # its config.json says float32
    "--report_to wandb": {"log.wandb": True},
    "--report_to tensorboard": {"log.tensorboard": True},
    "--report_to none --num_completions_to_print 9": {"log.wandb": False, "log.samples_per_step": 9},
    "--tensor_parallel 2 --pipeline_parallel 4 --sequence_parallel": {
        "layout.tp": 2,
        "layout.pp": 4,
        "layout.sequence_parallel": True,
    },
    "--eval_steps 10": {"eval.interval": 10, "data.heldout.path": "math_dataset@test"},
    "--dataset_test_split test": {"data.heldout.path": "math_dataset@test", "eval.interval": 0},
    "--dataset_train_split test --set batch.prompts_per_step=2": {"data.train.0.path": "math_dataset@test"},
    "--reward_weights 1 0.25": {"rewards.functions.1.weight": 0.25},
    "--scale_rewards batch": {"algorithm.std_over": "batch", "algorithm.normalize_by_std": True},
    "--multi_objective_aggregation normalize_then_sum": {"algorithm.adv_type": "gdpo"},
    "--off_policy_mask_threshold 0.5": {"algorithm.correction.off_policy_threshold": 0.5},
    "--set optimizer.lr=3e-6 --set algorithm.recipe=dapo": {
        "optimizer.lr": 3e-6,
        "algorithm.dynamic_sampling_tries": 4,
    },
    "--use_vllm false --repetition_penalty 1.0": {},
    "--system_prompt Think. --dataset_answer_column answer --shuffle_dataset false": {
        "data.system_prompt": "Think.",
        "data.shuffle": False,
    },
}


@pytest.mark.parametrize("flags", CASES)
def test_flags_set_the_keys_that_they_mean(flags: str) -> None:
    config = read(flags)
    for key, expected in CASES[flags].items():
        value: Any = config
        for part in key.split("."):
            value = value[int(part)] if part.isdecimal() else getattr(value, part)
        assert value == expected, key


@pytest.mark.parametrize("generations", [2, 4, 8])
@pytest.mark.parametrize(
    "batch",
    [
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 4},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "generation_batch_size": 16},
        {"gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 3},
    ],
    ids=str,
)
def test_the_batch_size_equals_trl(batch: dict[str, int], generations: int, folder: Path) -> None:
    flags = " ".join(f"--{name} {value}" for name, value in batch.items()) + f" --num_generations {generations}"
    try:
        trl = GRPOConfig(output_dir=str(folder / "trl"), use_cpu=True, bf16=False, num_generations=generations, **batch)
    except ValueError:
        with pytest.raises(ConfigError, match="whole groups of num_generations"):
            read(flags)
        return
    config = read(flags)
    assert config.batch.prompts_per_step * generations == trl.generation_batch_size
    assert config.batch.mini_batches * trl.gradient_accumulation_steps == trl.steps_per_generation
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    assert config.batch.tokens_per_micro_batch == trl.per_device_train_batch_size * longest


def test_data_parallel_ranks_count_like_devices_of_trl() -> None:
    flags = "--per_device_train_batch_size 8 --tensor_parallel 2"
    assert read(f"{flags} --data_parallel 4").batch.prompts_per_step == 2  # 8 x 4 / 16
    under_torchrun = read(flags, {"WORLD_SIZE": "16"})
    assert (under_torchrun.batch.prompts_per_step, under_torchrun.layout.dp) == (4, None)


def test_every_flag_is_from_trl_or_listed_as_an_exception() -> None:
    names = {field.name for kind in (GRPOConfig, ModelConfig, ScriptArguments) for field in fields(kind)}
    aliases = {alias for flag in FLAGS.values() for alias in flag.aliases}
    assert (FLAGS.keys() | NOTED.keys() | REFUSED.keys() | aliases) - names - NOT_TRLS <= {"torch_dtype", "fsdp_config"}
    assert not FLAGS.keys() & (NOTED.keys() | REFUSED.keys()) and not NOTED.keys() & REFUSED.keys()


def test_flags_without_effect_are_accepted_with_a_note() -> None:
    _, notes = parse_flags(f"{SEED} --logging_steps 1 --attn_implementation flash_attention_2".split())
    assert [note.split(":")[0] for note in notes] == [
        "--logging_steps has no effect",
        "--attn_implementation has no effect",
    ]


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["grpo", "--help"])
    output = capsys.readouterr().out
    assert all(f"--{name}" in output for name in FLAGS)
    assert max(map(len, output.splitlines())) <= 130


BAD = {
    "--learning_rat 1": ("unknown flag --learning_rat", "--learning_rate"),
    "--frobnicate": ("unknown flag --frobnicate", "--set KEY=VALUE"),
    "--learning_rate fast": ("--learning_rate fast", "not a number"),
    "--seed 1.5": ("--seed 1.5", "not a whole number"),
    "--bf16 maybe": ("--bf16 maybe", "true or false"),
    "--seed": ("--seed needs a whole number", "leave the flag out"),
    "--seed 1 2": ("--seed takes one value, but has 2", "quote"),
    "--seed 1 --seed 2": ("--seed is given twice", "once"),
    "--top_p 0.95": ("--top_p 0.95", "trained on the distribution that it samples from", "leave it out"),
    "--top_k 20": ("--top_k 20", "trained on the distribution that it samples from", "leave it out"),
    "--min_p 0.1": ("--min_p 0.1", "trained on the distribution that it samples from", "leave it out"),
    "--use_vllm": ("--use_vllm", "rollout.engine=sglang"),
    "--use_vllm true": ("--use_vllm true", "rollout.engine=sglang"),
    "--vllm_mode colocate": ("--vllm_mode colocate", "rollout.engine=sglang"),
    "--lora_r 8": ("--lora_r", "needs --use_peft"),
    "--use_peft --lora_dropout 0.05": ("--lora_dropout 0.05", "no dropout"),
    "--use_peft --use_rslora": ("--use_rslora", "lora_alpha / lora_r"),
    "--fp16": ("--fp16", "--bf16 true"),
    "--config recipe.yaml": ("--config recipe.yaml", "grpo-mega train"),
    "--deepspeed zero3.json": ("--deepspeed zero3.json", "--tensor_parallel"),
    "--loss_type ppo": ("--loss_type ppo", "grpo, sapo", "use one of them"),
    "--loss_type cispo --epsilon_high 0.3": ("--epsilon_high 0.3", "above 1"),
    "--loss_type sapo --delta 4": ("--delta 4", "sapo", "leave one out"),
    "--scale_rewards step": ("--scale_rewards step", "group, batch, none"),
    "--multi_objective_aggregation sum": ("--multi_objective_aggregation sum", "normalize_then_sum"),
    "--lr_scheduler_type polynomial": ("--lr_scheduler_type polynomial", "cosine"),
    "--warmup_steps 3 --warmup_ratio 0.1": ("--warmup_steps and --warmup_ratio", "one of them"),
    "--report_to comet_ml": ("--report_to comet_ml", "wandb, tensorboard or none"),
    "--eval_strategy steps": ("--eval_strategy steps needs --eval_steps",),
    "--ref_model_sync_steps 64": (
        "--ref_model_sync_steps 64 needs --sync_ref_model true",
        "leave ref_model_sync_steps out",
    ),
    "--sync_ref_model --beta 0": ("algorithm.ref_model_sync_steps=512 needs algorithm.kl_beta > 0",),
    "--dtype float16": ("model.dtype='float16'", "bfloat16"),
    "--bf16 --dtype float32": ("--bf16 true contradicts --dtype float32", "one of them"),
    "--reward_weights 1": ("--reward_weights 1 are 1", "accuracy format are 2", "one weight for each"),
    "--reward_weights 1 much": ("'much' is not a number",),
    "--per_device_train_batch_size 3": ("3 samples", "num_generations=16", "--per_device_train_batch_size 16"),
    "--per_device_train_batch_size 0": ("--per_device_train_batch_size 0 is not above 0",),
    "--steps_per_generation 3 --gradient_accumulation_steps 2": ("does not divide the 3 passes", "raise these to 4"),
    "--generation_batch_size 12": ("--generation_batch_size 12", "use 8 or 16"),
    "--num_train_epochs 0": ("--num_train_epochs 0", "--max_steps"),
    "--num_generations 1": ("algorithm.group_size=1", "must be at least 2"),
    "--set optimizer.learning_rate=1": ("unknown key 'optimizer.learning_rate'",),
    "--dataset_config main": ("--dataset_config main", "math_dataset is a path"),
    "--model_revision main": ("--model_revision main", "base is a folder"),
    "--set rewards.functions=[{name:~acuracy}]": ("acuracy", "did you mean accuracy"),
}


def assert_one_line_says(words: tuple[str, ...], errors: str) -> None:
    """The model and the data of these tests are in order for the flags alone, so other lines may follow."""
    lines = errors.splitlines()
    assert all(line.startswith("grpo-mega: error: ") for line in lines)
    assert len([line for line in lines if all(word in line for word in words)]) == 1, errors


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_a_one_line_error_and_leave_nothing(
    flags: str, capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    before = sorted(folder.rglob("*"))
    assert cli.main(["grpo", *SEED.split(), *(part.replace("~", " ") for part in flags.split())]) == 2
    assert_one_line_says(BAD[flags], capfd.readouterr().err)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--dataset_name d", ("--model_name_or_path is missing",)),
        ("base --dataset_name d", ("'base' stands before any flag", "--dataset_name")),
        (SEED.replace("base", "/none/base"), ("--model_name_or_path /none/base is no folder", "owner/name")),
        (SEED.replace("math_dataset", "none.jsonl"), ("none.jsonl does not exist",)),
        (
            f"{SEED} --eval_steps 5".replace("math_dataset", "math_dataset/train.jsonl"),
            ("--eval_steps 5", "data.heldout"),
        ),
        (
            f"{SEED} --dataset_test_split t".replace("math_dataset", "math_dataset/train.jsonl"),
            ("a file has no splits",),
        ),
        (SEED.replace("format", "fromat"), ("reward function 'fromat' is unknown", "did you mean format")),
    ],
)
def test_bad_names_are_a_one_line_error_too(
    flags: str, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["grpo", *flags.split()]) == 2
    assert_one_line_says(words, capfd.readouterr().err)


def test_a_model_that_the_hub_does_not_have_is_a_one_line_error(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is offline, and the cache is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    assert cli.main(["grpo", *SEED.replace("base", "deepseek-ai/deepseek-base").split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        "deepseek-ai/deepseek-base is neither a local folder nor available from" in line and "name its folder" in line
    )


def test_a_model_in_the_hubs_cache_is_found_without_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = folder / "cache/models--some--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "cache/models--some--model/refs").mkdir()
    (folder / "cache/models--some--model/refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    assert trl.read_config(SEED.replace("base", "some/model").split(), {})[0].model.path == snapshot


def test_reward_flags_of_train_replace_functions_and_keep_options(folder: Path) -> None:
    from grpo_mega import config as configs

    raw = {
        "run_dir": "run",
        "steps": 1,
        "model": {"path": "base"},
        "data": {"train": "math_dataset"},
        "rewards": {"functions": [{"name": "my.fn", "weight": 0.3, "options": {"limit": 7}}, {"name": "format"}]},
    }
    (folder / "config.yaml").write_text(json.dumps(raw))
    for spelling in (
        "--reward-funcs accuracy my.fn --reward-weights 1 2",
        "--reward_funcs accuracy my.fn --reward_weights 1 2",
    ):
        parser = argparse.ArgumentParser()
        add_options(parser, RewardOptions)
        parsed = parser.parse_args(["config.yaml", "--set", "steps=2", *spelling.split()])
        config = configs.load(Path("config.yaml"), overrides_of(read_options(RewardOptions, parsed)))
        found = [(f.name, f.weight, f.options) for f in config.rewards.functions]
        assert found == [("accuracy", 1.0, {}), ("my.fn", 2.0, {"limit": 7})] and config.steps == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--reward-funcs acuracy", ("reward function 'acuracy'", "did you mean accuracy")),
        ("--reward-funcs none.such.function", ("'none.such.function'", "no module none.such", "PYTHONPATH")),
        ("--reward-weights 1", ("--reward_weights 1 has no functions", "--reward_funcs")),
        ("--reward-funcs format format", ("names 'format' twice", "once")),
    ],
)
def test_bad_reward_flags_of_train_are_a_one_line_error(
    flags: str, words: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = {"run_dir": "run", "steps": 1, "model": {"path": "base"}, "data": {"train": "math_dataset"}}
    (folder / "config.yaml").write_text(json.dumps(raw))
    assert cli.main(["train", "config.yaml", *flags.split()]) == 2
    assert_one_line_says(words, capfd.readouterr().err)
    assert not (folder / "run").exists()
