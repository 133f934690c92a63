"""Config: accepts common files, and refuses invalid settings in one line with the remedy."""

# ruff: noqa: RUF001 - the comments of RLinf's block are Chinese

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mega import config
from grpo_mega.cli.commands.config import find_keys
from grpo_mega.config import data as config_data
from grpo_mega.errors import ConfigError

MINIMAL: dict[str, Any] = {"run_dir": "runs/a", "steps": 10, "model": {"path": "m"}, "data": {"train": "d.jsonl"}}

# The algorithm block in RLinf's documentation of GRPO, copied literally.
RLINF = """\
algorithm:
  # 核心 GRPO 设置（建议不要修改）
  adv_type: grpo
  loss_type: actor
  loss_agg_func: "token-mean"

  # 算法参数（通常需要调优）
  group_size: 16              # 每个提示采样的回答数量

  kl_beta: 0.0                # KL 惩罚系数
  kl_penalty_type: low_var_kl # 可选：low_var_kl, kl, abs, mse
  ratio_clip_eps: 0.2         # 重要性比率的裁剪范围

  calculate_entropy: False    # 可选：鼓励探索
  entropy_bonus: 0.0

  normalize_advantages: True
  early_stop_imp_ratio: 5.0   # 丢弃重要性比率极端的 minibatch，提升稳定性
  use_valid_token_scale: False # 标准 GRPO 实现。
                               # 若为 True，则优势会除以有效 token 数（DAPO 技巧）。
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, overrides: list[str]) -> config.Config:
    return config.load(write(tmp_path, yaml.safe_dump(MINIMAL)), overrides)


def test_the_algorithm_block_of_rlinf_loads_unchanged(tmp_path: Path) -> None:
    loaded = config.load(write(tmp_path, RLINF + yaml.safe_dump(MINIMAL))).algorithm
    expected = {
        "adv_type": "grpo",
        "loss_type": "actor",
        "loss_agg_func": "token-mean",
        "group_size": 16,
        "kl_beta": 0.0,
        "kl_penalty_type": "low_var_kl",
        "ratio_clip_eps": 0.2,
        "calculate_entropy": False,
        "entropy_bonus": 0.0,
        "normalize_advantages": True,
        "early_stop_imp_ratio": 5.0,
        "use_valid_token_scale": False,
    }
    assert loaded.model_dump(include=set(expected)) == expected


def test_a_dumped_config_loads_as_the_same_config(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=3e-7", "layout.tp=2", "rollout.stop_token_ids=[1, 2]", "data.system_prompt='a: b'"]
    loaded = load(tmp_path, overrides)
    assert config.load(write(tmp_path, config.dump(loaded))) == loaded


def test_the_folder_of_a_config_file_is_searched_for_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, yaml.safe_dump(MINIMAL))
    assert config.load(Path(path.name)).code_dir == tmp_path
    assert config.load(path, ["code_dir=elsewhere"]).code_dir == Path("elsewhere")
    assert config.load(path, ["code_dir=null"]).code_dir is None
    copy = tmp_path / "run"
    copy.mkdir()
    assert config.load(write(copy, config.dump(config.load(path)))).code_dir == tmp_path


def test_the_token_budget_is_per_context_parallel_rank(tmp_path: Path) -> None:
    """A sample of 2,045 tokens is padded to 4 * 512. Each of two ranks has 1,024 of them."""
    overrides = ["data.max_prompt_length=1021", "rollout.max_response_length=1024", "layout.cp=2"]
    assert load(tmp_path, [*overrides, "batch.tokens_per_micro_batch=1024"]).layout.num_trainers == 2
    with pytest.raises(ConfigError, match=r"2045 .*layout.cp=2 .* 1024"):
        load(tmp_path, [*overrides, "batch.tokens_per_micro_batch=1023"])


def test_set_overrides_the_file_in_order_and_adds_missing_sections(tmp_path: Path) -> None:
    loaded = load(tmp_path, ["optimizer.lr=1e-5", "optimizer.lr=2e-5", "data.heldout=h.jsonl", "log.wandb=true"])
    assert loaded.optimizer.lr == 2e-5
    assert loaded.data.heldout == config_data.DataSource(path="h.jsonl")
    assert loaded.log.wandb is True


def test_set_reads_its_value_as_yaml(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, ["rewards.functions=[{name: accuracy, weight: 2}]", "layout.dp=null", "data.system_prompt=a=b"]
    )
    assert [(function.name, function.weight) for function in loaded.rewards.functions] == [("accuracy", 2.0)]
    assert loaded.layout.dp is None
    assert loaded.data.system_prompt == "a=b"


@pytest.mark.parametrize(
    ("written", "paths", "weights"),
    [
        ("a.jsonl", ["a.jsonl"], [1.0]),
        ("[a, {path: b, weight: 3}]", ["a", "b"], [1.0, 3.0]),
        ("{path: hub:x/y@test, prompt_column: q}", ["hub:x/y@test"], [1.0]),
    ],
)
def test_training_data_is_one_path_or_a_list_of_weighted_sets(
    tmp_path: Path, written: str, paths: list[str], weights: list[float]
) -> None:
    loaded = load(tmp_path, [f"data.train={written}"])
    assert [source.path for source in loaded.data.train] == paths
    assert [source.weight for source in loaded.data.train] == weights
    assert config.load(write(tmp_path, config.dump(loaded))) == loaded


def test_clip_bounds_default_to_ratio_clip_eps(tmp_path: Path) -> None:
    assert (load(tmp_path, []).algorithm.clip_low, load(tmp_path, []).algorithm.clip_high) == (0.2, 0.2)
    algorithm = load(tmp_path, ["algorithm.ratio_clip_eps_high=0.28", "algorithm.ratio_clip_eps=0.1"]).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (0.1, 0.28)


def test_a_section_of_a_recipe_keeps_keys_that_are_not_given(tmp_path: Path) -> None:
    correction = load(tmp_path, ["algorithm={recipe: decoupled_ppo, correction: {mask_high: 2}}"]).algorithm.correction
    assert (correction.importance, correction.mask_low, correction.mask_high) == ("icepop", 0.0, 2.0)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        # unknown keys
        ("algorithm.group_sise=8", "unknown key 'algorithm.group_sise'; did you mean 'group_size'?"),
        ("stepps=8", "unknown key 'stepps'; did you mean 'steps'?"),
        (
            "rewards.functions=[{name: accuracy, wait: 1}]",
            "unknown key 'rewards.functions.0.wait'; did you mean 'weight'?",
        ),
        ("layout.zzz=1", "unknown key 'layout.zzz'; known keys here: tp, pp, vpp"),
        ("rollout.temprature=1", "unknown key 'rollout.temprature'; did you mean 'temperature'?"),
        ("temperature=1", "unknown key 'temperature'; did you mean 'rollout.temperature'?"),
        ("rollout.group_size=8", "unknown key 'rollout.group_size'; did you mean 'algorithm.group_size'?"),
        # values that are invalid by themselves
        ("steps=0", "steps=0: must be above 0; raise it"),
        ("steps=many", "steps='many': must be a whole number; write it in digits"),
        ("seed=-1", "seed=-1: must be at least 0; raise it"),
        ("algorithm.group_size=1", "algorithm.group_size=1: must be at least 2; raise it"),
        (
            "algorithm.kl_penalty_type=full",
            "algorithm.kl_penalty_type='full': must be 'low_var_kl', 'low_var_kl_weighted', 'low_var_kl+', ",
        ),
        ("algorithm.n_minibatches=4", "algorithm.n_minibatches=4: is RLinf's name; set batch.mini_batches instead"),
        ("algorithm.loss_agg_func=mean", "algorithm.loss_agg_func='mean': must be 'token-mean'"),
        ("algorithm.ratio_clip_eps=1.5", "algorithm.ratio_clip_eps=1.5: must be at most 1; lower it"),
        ("algorithm.kl_beta=-0.1", "algorithm.kl_beta=-0.1: must be at least 0; raise it"),
        ("rollout.top_p=1.5", "rollout.top_p=1.5: must be at most 1; lower it"),
        ("rollout.oversample=0.9", "rollout.oversample=0.9: must be at least 1; raise it"),
        (
            "rollout={longest_first: true, oversample: 1.5}",
            "rollout.longest_first=true needs rollout.partial=true or rollout.oversample=1.0, or short samples",
        ),
        ("rollout={engine: sglang, tp: 4, ep: 3}", "rollout.ep=3 does not divide rollout.tp=4; use 1, 2 or 4"),
        ("rollout.ep=2", "rollout.ep=2 does not divide rollout.tp=1; use 1"),
        (
            "rollout.partial=true",
            "rollout.partial=true needs rollout.oversample > 1, or nothing is left to continue; use 1.25",
        ),
        ("rollout.max_staleness=-1", "rollout.max_staleness=-1: must be at least 0; raise it"),
        (
            "rollout.placement=separate",
            "rollout.placement=separate needs layout.engine_ranks, ranks that only generate; set it",
        ),
        (
            "layout.engine_ranks=2",
            "layout.engine_ranks=2 needs rollout.placement=separate; set it, or leave engine_ranks out",
        ),
        ("rollout.temperature=0", "rollout.temperature=0: must be above 0; raise it"),
        ("optimizer.lr=.inf", "optimizer.lr=inf: must be a finite number; write"),
        ("algorithm.entropy_bonus=.nan", "algorithm.entropy_bonus=nan: must be a finite number; write"),
        ("model.dtype=fp16", "model.dtype='fp16': must be 'float32' or 'bfloat16'"),
        ("rollout.engine=sglan", "rollout.engine='sglan': must be 'embedded' or 'sglang'; did you mean 'sglang'?"),
        ("rollout.engine=vllm", "rollout.engine='vllm': must be 'embedded' or 'sglang'; use one of them"),
        ("model=m", "model='m': must be a section of keys; write it like {path: m}"),
        (
            "rewards.functions=accuracy",
            "rewards.functions='accuracy': must be a list; write it like [{name: accuracy}]",
        ),
        (
            "rewards.functions=[accuracy]",
            "rewards.functions.0='accuracy': must be a section of keys; write it like {name: accuracy}",
        ),
        ("rollout.stop_token_ids=5", "rollout.stop_token_ids=5: must be a list; write it like [5]"),
        ("rollout.server_args=5", "rollout.server_args=5: must be a section of keys; write it like {NAME: 5}"),
        ("device=tpu", "device='tpu': must be 'auto', 'cpu' or 'cuda'"),
        ("model=null", "model=None: "),
        ("model={}", "model.path is missing; it has no default"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1 is missing"),
        ("rewards.num_workers=0", "rewards.num_workers=0: must be above 0; raise it"),
        ("rewards.deadline_s=0", "rewards.deadline_s=0: must be above 0; raise it"),
        ("rewards.functions=[]", "rewards.functions is empty; name at least one, for example accuracy"),
        ("rewards.functions=[{name: a}, {name: a}]", "rewards.functions names 'a' twice; give it once"),
        # data
        ("data.heldout_fraction=1.0", "data.heldout_fraction=1.0: must be below 1; lower it"),
        (
            "data={train: a, heldout: b, heldout_size: 3}",
            "data.heldout.path=b conflicts with data.heldout_size=3; give one of them",
        ),
        ("data.train=[]", "data.train=[] is empty; name at least one dataset"),
        ("data.train=[a, {path: a}]", "data.train names 'a' twice; give it once, with its total weight"),
        ("data.train=[{path: a, wait: 1}]", "unknown key 'data.train.0.wait'; did you mean 'weight'?"),
        ("data.train=[{weight: 1}]", "data.train.0.path is missing; it has no default"),
        ("data.train=[{path: a, weight: 0}]", "data.train.0.weight=0: must be above 0; raise it"),
        (
            "data.heldout={path: a, weight: 1}",
            "unknown key 'data.heldout.weight'; known keys here: path, prompt_column",
        ),
        ("sync.prove=false", "sync.prove is called sync.verify now; rename the key"),
        # invalid overrides
        ("steps", "--set 'steps' is not of the form key.subkey=value"),
        ("steps.x=1", "--set 'steps.x=1': 'steps' is a value, not a section"),
        ("steps=[", "--set 'steps=[': '[' is not a YAML value"),
    ],
)
def test_a_bad_value_is_named_in_one_line_with_a_valid_one(tmp_path: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(problem)) as caught:
        load(tmp_path, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [1", "not YAML ("),
        ("- a", "holds list, not a mapping of keys; see examples"),
        ("", "holds nothing, not a mapping of keys; see examples"),
    ],
)
def test_a_file_that_is_no_config_is_a_one_line_error(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        config.load(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_all_broken_rules_of_values_and_sections_are_listed(tmp_path: Path) -> None:
    """Rules about other keys come last."""
    rules = ["layout.vpp=2", "layout.sequence_parallel=true", "batch.mini_batches=5"]
    for overrides, keys in (
        (["steps=0", "optimizer.learning_rate=1", "eval.ks=[9]"], ["steps=0:", "unknown", "eval.ks=[9]"]),
        (rules, sorted(rules)),
    ):
        with pytest.raises(ConfigError) as found:
            load(tmp_path, [*overrides, *rules])
        assert sorted(line.split()[0] for line in found.value.lines) == sorted(keys)


@pytest.mark.parametrize(
    "value", ["zzz", -1e30, 0, [], [1], {"zzz": 1}, None, 1.5, 1e40, 10**12, True, "", [[]], float("nan")], ids=repr
)
def test_every_key_refuses_a_wrong_value_in_our_words(value: Any) -> None:
    """A line has the key, its value, what it must be, and a remedy. None is in the words of pydantic."""
    lines = []
    for key in find_keys(config.Config):
        raw = json.loads(json.dumps(MINIMAL))
        *sections, leaf = key.name.replace("NAME", "x").split(".")
        node: Any = raw
        for name in sections:
            node = node.setdefault(name.removesuffix("[]"), [{}] if name.endswith("[]") else {})
            node = node[0] if name.endswith("[]") and isinstance(node, list) else node
        if isinstance(node, dict):
            node[leaf.removesuffix("[]")] = value
            try:
                config.validate(raw)
            except ConfigError as error:
                lines += error.lines
    assert len(lines) > 40
    assert not [line for line in lines if re.search("input should|valid (integer|number|string)|permitted", line)]
    assert not [line for line in lines if ": must " in line and not re.search("^[a-z_.0-9x]+=.*: must .*; ", line)]


def test_a_file_extends_the_file_that_it_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    rewards = {"functions": [{"name": "accuracy"}, {"name": "format"}], "num_workers": 3}
    base = MINIMAL | {"algorithm": {"recipe": "dapo", "group_size": 5}, "rewards": rewards}
    (tmp_path / "base/a\u2028.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    keys = {"include": "base/a\u2028.yaml", "steps": 7, "algorithm": {"group_size": 3}}
    path = write(tmp_path, yaml.safe_dump(keys | {"rewards": {"functions": [{"name": "format"}]}}))
    whole = base | {"steps": 7, "algorithm": {"recipe": "dapo", "group_size": 3}, "code_dir": str(tmp_path)}
    whole["rewards"] = rewards | {"functions": [{"name": "format"}]}
    assert config.load(path) == config.validate(whole)
    assert config.load(path, ["algorithm.group_size=9"]).algorithm.group_size == 9
    monkeypatch.chdir(tmp_path / "base")
    assert config.load(Path("../config.yaml"), [f"code_dir={tmp_path}"]) == config.load(path)
    assert "include" not in config.dump(config.load(path))


@pytest.mark.parametrize(
    ("included", "text", "problem"),
    [
        ("none.yaml", "", "none.yaml: No such file or directory; name an existing YAML file"),
        ("a.yaml", "include: c.yaml", "a.yaml: is included by {}, so it must not include a third; merge two of them"),
        ("[a.yaml]", "", "include=['a.yaml'] must be the name of a YAML file; write it like base.yaml"),
        ("a.yaml", "stepz: 3", "unknown key 'stepz'; did you mean 'steps'?"),
    ],
)
def test_a_wrong_include_is_one_line(tmp_path: Path, included: str, text: str, problem: str) -> None:
    (tmp_path / "a.yaml").write_text(text or yaml.safe_dump(MINIMAL))
    path = write(tmp_path, f"include: {included}\n" + yaml.safe_dump(MINIMAL))
    with pytest.raises(ConfigError) as raised:
        config.load(path)
    (line,) = raised.value.lines
    assert line.endswith(problem.format(path))


def test_a_folder_in_place_of_a_config_is_an_error_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"; name a YAML file$"):
        config.load(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=r"`grpo-mega init .* DATA`"):
        config.load(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"; .*/config\.yaml$"):
        config.load(tmp_path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: .*; name an existing"):
        config.load(tmp_path / "none.yaml")


def test_a_validated_config_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path, []).steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(("given", "steps"), [("3", [3]), (3, [3]), ("2-4", [2, 3, 4]), (None, [])])
def test_steps_to_trace_are_one_or_a_range(given: object, steps: list[int]) -> None:
    assert list(config.LogConfig(profile=given).profiled_steps) == steps  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["0", "4-2", "-1", "3-", "three", "1,2", True])
def test_steps_to_trace_that_are_neither_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match=f"log.profile='{given}' .*3 or 3-4"):
        config.LogConfig(profile=given)  # type: ignore[arg-type]
