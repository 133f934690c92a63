"""The whole plan: results for known jobs, formulas, output formats and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mega import cli
from grpo_mega.cli.commands.options import PlanOptions
from grpo_mega.cli.commands.plan import prepare_plan
from grpo_mega.cli.planner.memory import PHASES
from grpo_mega.cli.planner.plan import MARGIN, Plan, suggest
from grpo_mega.cli.planner.state import elements_of
from grpo_mega.weights.layout import megatron_shards
from tests.helpers.shapes import LLAMA_70B

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
}
QWEN2_HALF_B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
RECIPE: dict[str, Any] = {
    "run_dir": "runs/70b",
    "steps": 100,
    "model": {"dtype": "bfloat16", "recompute": "selective"},
    "layout": {"tp": 4, "pp": 4, "dp": 4, "sequence_parallel": True},
    "data": {"train": "data/elsewhere.jsonl", "max_prompt_length": 1024},
    "rollout": {"engine": "sglang", "tp": 8, "max_response_length": 3072},
    "algorithm": {"group_size": 32, "kl_beta": 0.01},
    "batch": {"prompts_per_step": 64, "mini_batches": 4, "tokens_per_micro_batch": 8192},
}
BLOCKWISE = {"layout.pp": 8, "layout.dp": 2, "precision.fp8": "e4m3", "precision.fp8_recipe": "blockwise"}

MakeConfig = Callable[..., Path]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """Write a model's config.json and a YAML for it, with `changes` by dotted key."""

    def make(fields: dict[str, Any] = LLAMA_70B, **changes: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        raw = json.loads(json.dumps(RECIPE))
        raw["model"]["path"] = str(folder)
        for key, value in changes.items():
            section, name = key.split(".")
            raw.setdefault(section, {})[name] = value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return make


def plan_of(path: Path, **request: Any) -> Plan:
    setup, findings = prepare_plan(PlanOptions(path, **request))
    assert setup is not None and not findings.violations
    return Plan(setup)


@pytest.mark.parametrize("changes", [{}, {"model.recompute": "full"}, BLOCKWISE, {"layout.vpp": 4}], ids=str)
def test_llama_70b_fits_64_h100_with_the_margin_for_estimates(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    plan = plan_of(make_config(**changes))
    assert plan.fits and plan.spare >= MARGIN
    assert set(plan.worst.totals) == set(PHASES)


def test_an_unset_dtype_is_bfloat16_and_the_plan_reports_it(make_config: MakeConfig) -> None:
    path = make_config()
    raw = yaml.safe_load(path.read_text())
    del raw["model"]["dtype"]
    expected, _ = prepare_plan(PlanOptions(path))
    path.write_text(yaml.safe_dump(raw))
    setup, findings = prepare_plan(PlanOptions(path, gpu="a100"))
    assert setup is not None and expected is not None and setup.config == expected.config
    assert "model.dtype=bfloat16, because it is not set and this job runs on GPUs" in findings.notes


def test_llama_70b_has_the_host_memory_and_checkpoint_computed_by_hand(make_config: MakeConfig) -> None:
    plan = plan_of(make_config())
    parameters = 70_553_706_496  # Meta states 70.6B
    assert plan.checkpoint == 14 * parameters
    # Each of 8 ranks has 1/16: weights twice (policy and reference) in bf16, masters and moments over 4 data-parallel
    # ranks.
    by_hand = 8 * parameters / 16 * (2 + 2 + 12 / 4) / 2**30
    assert by_hand == pytest.approx(230, abs=1)
    assert plan.host.pinned_total.gib == pytest.approx(by_hand, rel=0.05)  # the first stage also has the embedding
    iterated = plan_of(make_config(**{"algorithm.ref_model_sync_steps": 9, "algorithm.ref_model_mixup_alpha": 0.5}))
    # Plus the average; a node holds half of it and stages an eighth.
    assert iterated.checkpoint == 18 * parameters
    assert iterated.host.peak - plan.host.peak == pytest.approx((4 / 2 + 4 / 8) * parameters, rel=0.05)


def test_gradients_without_tensor_parallelism_do_not_fit(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without tensor parallelism an H100 has no space for the gradients of a quarter of 70B parameters."""
    path = make_config(**{"layout.tp": 1, "layout.sequence_parallel": False, "layout.dp": 16})
    assert cli.main(["plan", str(path)]) == 1
    assert "DOES NOT FIT: " in capsys.readouterr().out


def test_an_engine_whose_cache_is_too_small_does_not_fit(make_config: MakeConfig) -> None:
    plan = plan_of(make_config(**{"rollout.tp": 1}))
    assert not plan.fits
    assert plan.shortfalls[0].startswith("the engine's KV cache holds 0 tokens, but the longest sample has 4096; ")


def test_parameter_counts_equal_the_weight_mapping(make_config: MakeConfig) -> None:
    for fields in (LLAMA_70B, QWEN3_30B_A3B, QWEN2_HALF_B):
        changes = {"layout.tp": 2, "layout.pp": 4, "layout.dp": 8, "rollout.tp": 2}
        plan = plan_of(make_config(fields, **changes))
        setup = plan.setup
        for stage in plan.stages:
            rank = next(r for r in range(setup.world_size) if setup.layout.place(r)[1] == stage.pp_rank)
            holding = megatron_shards(setup.family, setup.shape, setup.layout).rank_shards(rank)
            elements = sum(_size(tensor.shape) for tensor in holding.values())
            assert stage.state.num_parameters == elements
        assert elements_of(setup.family, setup.shape, None).total == plan.checkpoint / 14


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_the_shares_of_data_parallel_ranks_add_up_to_the_parameters(make_config: MakeConfig, ep: int) -> None:
    """Every element is in one optimizer. Each of ep ranks has different experts."""
    changes = {"layout.ep": ep, "layout.pp": 2, "layout.dp": 8, "rollout.tp": 4, "layout.overlap_grad_reduce": True}
    plan = plan_of(make_config(QWEN3_30B_A3B, **changes))
    shape = plan.setup.shape
    experts_a_stage = 24 * shape.num_experts * 3 * shape.hidden * shape.moe_ffn
    for stage in plan.stages:
        dense = stage.state.num_parameters - experts_a_stage // ep
        assert sum(stage.state.optimizer_elements) == plan.setup.layout.tp * dense + experts_a_stage


def test_json_has_the_fields_that_scripts_use(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(make_config()), "--json", "--suggest"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["violations"] == []
    assert 0 < found["peak_gib"] < found["capacity_gib"]
    assert found["tokens_per_second_per_gpu"] > 0 and found["step_seconds"] > 0
    assert len(found["ranks"]) == 64 and found["ranks"][4] == {"tp": 0, "pp": 0, "dp": 1, "cp": 0}
    assert sum(one["label"] == "KV cache" for figures in found["figures"].values() for one in figures) == 1
    assert len(found["suggestions"]) == 5


def test_json_of_an_illegal_config_has_the_same_fields_and_every_violation(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_config(**{"layout.tp": 3, "layout.pp": 100, "rollout.tp": 5, "layout.dp": 1})
    assert cli.main(["plan", str(path), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["peak_gib"], found["step_seconds"]) == (False, None, None)
    problems = [violation.partition("; ")[0] for violation in found["violations"]]
    assert problems == [
        "layout.tp=3 does not divide the model's 64 attention heads",
        "layout.pp=100 with vpp=1 makes 100 model chunks, but the model has 80 layers",
        "rollout.tp=5 does not divide the model's 64 attention heads",
        "rollout.tp=5 does not divide each node's 8 ranks",
    ]
    assert all("; use " in violation for violation in found["violations"])


def test_an_illegal_config_is_reported_as_text_with_exit_code_2(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(make_config()), "--world-size", "48", "--set", "rollout.tp=16"]) == 2
    out = capsys.readouterr().out
    assert "WORLD_SIZE=48 contradicts layout.tp=4, pp=4, dp=4; start 64 processes" in " ".join(out.split())
    assert "rollout.tp=16 does not divide each node's 8 ranks" in out


def test_an_impossible_plan_is_one_line_on_stderr(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_config()
    for arguments in (
        ["--set", "layout.vpp=2", "--set", "layout.pp=1"],
        ["--mean-response", "1e9"],
        ["--gpus-per-node", "0"],
    ):
        assert cli.main(["plan", str(path), *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert cli.main(["plan", str(path), *arguments, "--json"]) == 2
        assert len(json.loads(capsys.readouterr().out)["violations"]) == 1


def test_an_unknown_model_is_one_of_several_violations(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_config(LLAMA_70B | {"model_type": "gpt2"}, **BLOCKWISE)
    assert cli.main(["plan", str(path), "--gpu", "a100", "--json"]) == 2
    problems = [problem.partition(";")[0] for problem in json.loads(capsys.readouterr().out)["violations"]]
    assert problems == [
        "model_type 'gpt2' is not known",
        "precision.fp8_recipe='blockwise' needs an H100, H200 or later, found A100 80GB SXM",
    ]


def test_a_card_that_cannot_compute_the_precision_is_a_violation(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(make_config(**BLOCKWISE)), "--gpu", "a100"]) == 2
    assert "precision.fp8_recipe='blockwise' needs an H100, H200 or later, found A100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "changes", "arguments"),
    [
        (LLAMA_70B, {}, ["--suggest"]),
        (
            LLAMA_70B,
            {"layout.tp": 1, "layout.sequence_parallel": False, "layout.dp": 16, "model.recompute": "none"},
            [],
        ),
        (LLAMA_70B, {"layout.tp": 3, "layout.pp": 100, "rollout.tp": 5, "layout.dp": 1}, []),
        (
            QWEN3_30B_A3B,
            {"layout.ep": 4, "layout.pp": 1, "layout.dp": 16, "rollout.tp": 4},
            ["--gpu", "b200"],
        ),
        (QWEN2_HALF_B, {"layout.tp": 2, "rollout.engine": "embedded", "rollout.tp": 1}, ["--gpu", "a100"]),
    ],
    ids=str,
)
def test_the_text_reads_well_at_100_columns(
    make_config: MakeConfig,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    changes: dict[str, Any],
    arguments: list[str],
) -> None:
    cli.main(["plan", str(make_config(fields, **changes)), *arguments])
    lines = [line for line in capsys.readouterr().out.splitlines() if "/model has no" not in line]  # a path may be long
    assert lines
    assert [line for line in lines if len(line) > 100 or line != line.rstrip()] == []


def test_files_missing_on_this_machine_are_notes(make_config: MakeConfig) -> None:
    _, findings = prepare_plan(PlanOptions(make_config()))
    assert findings.violations == []
    notes = " | ".join(findings.notes)
    assert "no weights here" in notes and "no tokenizer here" in notes and "data/elsewhere.jsonl" in notes


def test_the_model_may_be_another_config_json(make_config: MakeConfig, tmp_path: Path) -> None:
    path = make_config()
    other = tmp_path / "other.json"
    other.write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": 40}))
    assert plan_of(path, model_config=other).setup.shape.num_layers == 40


def test_suggestions_are_legal_fit_with_room_and_come_best_first(make_config: MakeConfig) -> None:
    path = make_config()
    setup, _ = prepare_plan(PlanOptions(path))
    assert setup is not None
    options = suggest(setup)
    assert len(options) == 5
    rates = [option.rate for option in options]
    assert all(later < 1.02 * earlier for earlier, later in pairwise(rates))  # closer rates count as equal
    for option in options:
        again = plan_of(path, overrides=option.flags.replace("--set ", "").split())
        assert again.fits and again.spare >= MARGIN
        assert again.timing.tokens_per_second_per_gpu == option.plan.timing.tokens_per_second_per_gpu


def test_more_of_a_thing_never_takes_less_memory(make_config: MakeConfig) -> None:
    base = plan_of(make_config())

    def peak(**changes: Any) -> float:
        return float(plan_of(make_config(**changes)).worst.totals["update"])

    update = base.worst.totals["update"]
    assert peak(**{"batch.tokens_per_micro_batch": 16384}) > update
    assert peak(**{"model.recompute": "none"}) > update > peak(**{"model.recompute": "full"})
    assert peak(**{"layout.sequence_parallel": False}) > update
    assert peak(**{"layout.pp": 8, "layout.dp": 2}) < update
    assert peak(**{"optimizer.moments_dtype": "bfloat16"}) < update
    assert peak(**{"layout.vpp": 4}) > update  # more micro-batches wait


def test_an_optimizer_on_the_cpu_frees_the_device_and_takes_longer(make_config: MakeConfig) -> None:
    usual, offloaded = (plan_of(make_config(**{"optimizer.cpu_offload": on})) for on in (False, True))
    share = usual.worst.state.largest_share
    assert usual.worst.totals["update"] - offloaded.worst.totals["update"] == 12 * share
    on_host = {number.label: number for number in offloaded.host.pinned}
    assert on_host["optimizer state"] == 0 and on_host["optimizer.cpu_offload"] == pytest.approx(
        16 * 8 * share, rel=1e-3
    )
    before, after = ({one.label: one for one in plan.timing.phases} for plan in (usual, offloaded))
    assert after["update"] > before["update"] + 4 * 6 * share / 64e9  # per step gradients and weights by PCIe 5
    assert after["offload and onload"] < before["offload and onload"]


def test_phases_hold_only_what_is_awake_in_them(make_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(make_config())
    held = {phase: {part.label for part in parts if part} for phase, parts in plan.worst.phases.items()}
    stay = {"CUDA contexts", "NCCL buffers", "workspaces", "sync buckets", "engine's workspaces"}
    assert held["asleep"] == stay and all(stay <= labels for labels in held.values())
    assert {phase for phase, labels in held.items() if "engine's graphs" in labels} == {"sampling"}
    assert {phase for phase, labels in held.items() if "optimizer state" in labels} == {"update", "checkpoint"}
    free, totals = plan.free_gib, {phase: part.gib for phase, part in plan.worst.totals.items()}
    assert free["generation"] == pytest.approx(plan.capacity_gib - totals["sampling"])
    assert free["asleep"] == pytest.approx(plan.capacity_gib - totals["asleep"])
    training = max(stage.totals[phase].gib for stage in plan.stages for phase in ("log-probs", "update", "checkpoint"))
    assert free["training"] == plan.capacity_gib - training
    assert cli.main(["plan", str(make_config())]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {row} " in said for row in ("NCCL buffers", "engine's graphs", "engine's workspaces"))
    assert cli.main(["plan", str(make_config()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["free_gib"] == {name: round(gib, 3) for name, gib in free.items()}


def test_recomputing_some_layers_lies_between_none_and_all(make_config: MakeConfig) -> None:
    def figures(**changes: Any) -> tuple[float, float]:
        plan = plan_of(make_config(**{"layout.pp": 4, "layout.dp": 4} | changes))
        return plan.worst.totals["update"].gib, float(plan.timing.step)

    (most, fastest), (least, slowest) = (figures(**{"model.recompute": name}) for name in ("none", "full"))
    halves = {"model.recompute": "full", "model.recompute_num_layers": 10}
    memory, seconds = figures(**halves)
    assert memory == pytest.approx((most + least) / 2, rel=0.1) and least < memory < most
    assert seconds == pytest.approx((fastest + slowest) / 2, rel=0.02) and fastest < seconds < slowest
    core = {"model.recompute": "selective", "model.recompute_modules": ["core_attn", "mlp"]}
    assert figures(**{"model.recompute": "selective"})[1] < figures(**core)[1] < slowest


def test_an_engine_that_never_sleeps_takes_its_memory_from_the_trainer(make_config: MakeConfig) -> None:
    turns = plan_of(make_config())
    never = plan_of(make_config(**{"rollout.sleep": "never", "rollout.memory_fraction": 0.4}))
    cache = never.engine.cache + never.engine.weights + never.engine.graphs
    for before, after in zip(turns.stages, never.stages, strict=True):
        assert after.totals["update"] == pytest.approx(before.totals["update"] + cache)
    assert never.host.pinned[1] == 0


def test_memory_that_the_trainer_keeps_is_counted_in_every_phase(make_config: MakeConfig) -> None:
    """Count the context, the workspaces, and the three buckets that the engine has opened; a sync has two more."""
    plan = plan_of(make_config(**{"sync.bucket_mib": 384}))
    for phase in PHASES:
        found = {figure.label: figure for figure in plan.worst.phases[phase]}
        assert (found["workspaces"], found["sync buckets"]) == (0.5 * 2**30, 3 * 384 * 2**20)
        assert found.get("sync buckets in flight") == (2 * 384 * 2**20 if phase == "sync" else None)


def test_a_reference_in_bf16_costs_the_same_with_and_without_fp8(make_config: MakeConfig) -> None:
    def logprobs(**changes: Any) -> float:
        return next(p for p in plan_of(make_config(**changes)).timing.phases if p.label == "log-probs")

    # With one optimizer step only the reference has a pass.
    layout = {
        "layout.pp": 8,
        "layout.dp": 2,
        "batch.mini_batches": 1,
    }
    in_fp8 = layout | {"precision.fp8": "hybrid", "precision.fp8_recipe": "tensorwise"}
    assert logprobs(**in_fp8) == logprobs(**layout) > logprobs(**in_fp8, **{"precision.fp8_reference": True})
    two, both = {"batch.mini_batches": 2}, {"precision.fp8_reference": True}
    mixed, neither = logprobs(**in_fp8 | two), logprobs(**layout | two)
    assert mixed == pytest.approx((logprobs(**in_fp8 | two | both) + neither) / 2)


def test_twice_the_gpus_do_not_halve_the_step_but_nearly(make_config: MakeConfig) -> None:
    one = plan_of(make_config())
    two = plan_of(make_config(**{"layout.dp": 8}))
    assert 0.45 < two.timing.step / one.timing.step < 0.8


def test_mean_lengths_move_times_and_not_memory(make_config: MakeConfig) -> None:
    path = make_config()
    short, long = plan_of(path, mean_response=256.0), plan_of(path, mean_response=3000.0)
    assert short.timing.step < long.timing.step
    assert short.peak_gib == long.peak_gib
    assert replace(short.setup, mean_response=3000.0) == long.setup


def test_fp8_for_the_engine_halves_its_linear_layers(make_config: MakeConfig) -> None:
    plain, quantised = (plan_of(make_config(**{"rollout.quantization": how})) for how in (None, "fp8"))
    linear = 80 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672) // 8
    assert plain.engine.weights - quantised.engine.weights == linear - 4 * (linear // 128**2)  # scales of blocks
    assert quantised.engine.cache_tokens > plain.engine.cache_tokens


def test_planning_imports_nothing_heavy(make_config: MakeConfig) -> None:
    program = (
        "import sys\nfrom grpo_mega import cli\n"
        "code = cli.main(sys.argv[1:])\n"
        "heavy = {name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', 'megatron', 'sglang'}\n"
        "sys.exit(code or 3 * bool(heavy))"
    )
    arguments = ["plan", str(make_config()), "--suggest"]
    assert subprocess.run([sys.executable, "-c", program, *arguments], stdout=subprocess.DEVNULL).returncode == 0


def test_a_small_model_and_its_engine_are_found_to_fit_together(make_config: MakeConfig) -> None:
    changes = {
        "layout.tp": 1,
        "layout.sequence_parallel": False,
        "layout.pp": 1,
        "rollout.tp": 1,
        "rollout.cache_tokens": 65536,
    }
    assert plan_of(make_config(QWEN2_HALF_B, **changes)).both_fit
    assert not plan_of(make_config()).both_fit
