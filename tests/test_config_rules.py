"""Rules between the keys of a config: what a key needs, excludes or divides, and whether a resume may change it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_mega import config
from grpo_mega.cli.commands.config import find_keys, run
from grpo_mega.cli.commands.options import KeyOptions
from grpo_mega.config.base import free_keys, walk
from grpo_mega.errors import ConfigError
from tests.test_config import load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        # agents and tools
        ("rollout={tools: [a.b, a.b]}", "rollout.tools names 'a.b' twice; give it once"),
        ("rollout.max_turns=3", "rollout.max_turns=3 needs rollout.agent or rollout.tools; leave it out"),
        ("rollout.tool_format=hermes", "rollout.tool_format=hermes needs rollout.agent or rollout.tools; leave it"),
        (
            "rollout={agent: a.b, tools: [a.c]}",
            "rollout.tools=['a.c'] conflicts with rollout.agent=a.b, which has its own; leave tools out",
        ),
        (
            "rollout={tools: [a.b], oversample: 2}",
            "rollout.oversample=2.0 conflicts with rollout.tools=['a.b'], whose samples are generated whole;",
        ),
        (
            "rollout={agent: a.b, oversample: 2}",
            "rollout.oversample=2.0 conflicts with rollout.agent=a.b, whose samples are generated whole; leave",
        ),
        (
            "rollout={agent: a.b, longest_first: true}",
            "rollout.longest_first=true conflicts with rollout.agent=a.b, whose samples are generated whole;",
        ),
        (
            "rollout={agent: a.b, placement: separate} --set layout.engine_ranks=1",
            "rollout.placement=separate conflicts with rollout.agent=a.b",
        ),
        (
            "rollout={agent: a.b, routing_replay: true}",
            "rollout.routing_replay=true conflicts with rollout.agent=a.b, whose samples are generated whole;",
        ),
        # values that contradict other values
        (
            "batch.mini_batches=5",
            "batch.mini_batches=5 does not divide batch.prompts_per_step=32; use 1, 2, 4, 8, 16 or 32",
        ),
        ("batch.tokens_per_micro_batch=2000", "batch.tokens_per_micro_batch=2000 cannot hold the longest sample"),
        (
            "layout.sequence_parallel=true",
            "layout.sequence_parallel=true needs layout.tp > 1; set it, or leave sequence_parallel out",
        ),
        (
            "layout={cp: 2, dp: 3, ep: 4}",
            "layout.ep=4 does not divide tp * cp * dp / etp = 6; use 1, 2, 3 or 6",
        ),
        ("layout={tp: 4, etp: 3}", "layout.etp=3 does not divide layout.tp=4; use 1, 2 or 4"),
        ("layout.cp_comm_type=all_gather", "layout.cp_comm_type='all_gather': must be 'p2p' or 'a2a'"),
        ("layout.cp_comm_type=a2a+p2p", "layout.cp_comm_type='a2a+p2p': must be 'p2p' or 'a2a'"),
        ("layout.vpp=2", "layout.vpp=2 needs layout.pp > 1 or layout.vpp=1; set it, or leave vpp out"),
        ("layout.overlap_param_gather=true", "layout.overlap_param_gather=true needs layout.overlap_grad_reduce=true"),
        (
            "algorithm.entropy_bonus=0.01",
            "algorithm.entropy_bonus=0.01 needs algorithm.calculate_entropy=true; set it, or leave entropy_bonus",
        ),
        (
            "algorithm.correction={importance: icepop, mask: sequence}",
            "algorithm.correction.mask=sequence conflicts with algorithm.correction.importance=icepop, whose",
        ),
        (
            "algorithm.correction={importance: icepop, max_importance: 5}",
            "algorithm.correction.max_importance=5.0 conflicts with algorithm.correction.importance=icepop,",
        ),
        (
            "algorithm.correction={min_importance: 0.5}",
            "algorithm.correction.min_importance=0.5 needs algorithm.correction.importance=token or sequence;",
        ),
        (
            "algorithm.correction={importance: token, min_importance: 3}",
            "algorithm.correction.min_importance=3.0 is above algorithm.correction.max_importance=2.0; lower it",
        ),
        (
            "algorithm.correction={batch_normalize: true}",
            "algorithm.correction.batch_normalize=true needs algorithm.correction.importance, whose weights it",
        ),
        (
            "algorithm.correction={reject: token_k2}",
            "algorithm.correction.reject=token_k2 needs algorithm.correction.reject_above, its bound; set it,",
        ),
        (
            "algorithm.correction={reject_above: 1}",
            "algorithm.correction.reject_above=1.0 needs algorithm.correction.reject;",
        ),
        (
            "algorithm.correction={reject: token_k1}",
            "algorithm.correction.reject='token_k1': must be 'none'",
        ),
        (
            "algorithm={kl_in: reward, adv_type: gdpo}",
            "algorithm.kl_in=reward conflicts with algorithm.adv_type=gdpo; use kl_in=loss",
        ),
        (
            "algorithm.kl_target=0.1",
            "algorithm.kl_target=0.1 needs algorithm.kl_beta > 0, the initial weight; set it, or leave kl_target",
        ),
        (
            "algorithm={adv_type: rloo, std_over: batch}",
            "algorithm.std_over=batch needs algorithm.adv_type=grpo; use group",
        ),
        (
            "algorithm={adv_type: grpo_leave_one_out, group_size: 2}",
            "algorithm.group_size=2 conflicts with algorithm.adv_type=grpo_leave_one_out, which needs a",
        ),
        (
            "algorithm={adv_type: gdpo, overlong_buffer: 0.1}",
            "algorithm.overlong_buffer=0.1 conflicts with algorithm.adv_type=gdpo; punish length by a reward",
        ),
        ("algorithm.pass_k=2", "algorithm.pass_k=2 needs algorithm.adv_type=pass_at_k; set it, or leave pass_k out"),
        (
            "algorithm={adv_type: pass_at_k, pass_k: 17}",
            "algorithm.pass_k=17 is above algorithm.group_size=16; lower it",
        ),
        ("algorithm.cov_share=0.1", "algorithm.cov_share=0.1 needs algorithm.loss_type=clip_cov or kl_cov; set it"),
        (
            "algorithm={loss_type: kl_cov, cov_low: 2} --set batch.epochs=2",
            "algorithm.cov_low=2.0 needs algorithm.loss_type=clip_cov; set it, or leave cov_low out",
        ),
        ("algorithm={loss_type: clip_cov, cov_kl: 2}", "algorithm.cov_kl=2.0 needs algorithm.loss_type=kl_cov; set it"),
        (
            "algorithm={loss_type: clip_cov, cov_low: 7}",
            "algorithm.cov_low=7.0 is not below algorithm.cov_high=5.0; lower it",
        ),
        ("algorithm.positive_above=0.5", "algorithm.positive_above=0.5 needs algorithm.positive_nll > 0; set it"),
        (
            "algorithm.recipe=kl_cov",
            "algorithm.loss_type=kl_cov has a penalty of 0 in the first optimizer step of a rollout",
        ),
        (
            "model.router.balancing=aux_loss",
            "model.router.balancing=aux_loss needs model.router.aux_loss_coeff > 0; set it, or leave balancing out",
        ),
        (
            "model.router={freeze: true, z_loss_coeff: 0.1}",
            "model.router.z_loss_coeff=0.1 conflicts with model.router.freeze=true; leave z_loss_coeff out",
        ),
        ("optimizer.min_lr=1", "optimizer.min_lr=1.0 is above optimizer.lr=1e-06; lower it"),
    ],
)
def test_a_broken_rule_is_one_line_with_both_keys_and_a_remedy(tmp_path: Path, overrides: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(problem)) as caught:
        load(tmp_path, overrides.split(" --set "))
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


def test_dropped_tokens_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.routing_replay=true conflicts with model\.router\.capacity_factor=2"
    ):
        load(tmp_path, ["model.router.capacity_factor=2", "rollout.routing_replay=true"])


def test_gdpo_needs_several_rewards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gdpo normalises several rewards, but"):
        load(tmp_path, ["algorithm.recipe=gdpo", "rewards.functions=[{name: accuracy}]"])
    with pytest.raises(ConfigError, match="gdpo adds rewards, but 'format' multiplies them; leave multiplies out"):
        load(
            tmp_path,
            ["algorithm.recipe=gdpo", "rewards.functions=[{name: accuracy}, {name: format, multiplies: true}]"],
        )
    assert load(tmp_path, ["algorithm.recipe=gdpo"]).algorithm.adv_type == "gdpo"


def test_a_key_says_whether_a_resume_may_change_it(capsys: pytest.CaptureFixture[str]) -> None:
    for key, is_free in (("optimizer.lr", True), ("layout.tp", True), ("optimizer.betas", False), ("seed", False)):
        run(KeyOptions(key=key))
        head, *_ = capsys.readouterr().out.splitlines()
        assert head.endswith("; may change on resume") == is_free, head
    keys = set(free_keys(config.Config))
    assert len(keys) > 50 and {"steps", "rollout.tp", "algorithm.kl_beta"} < keys
    assert not keys & {"seed", "model", "data", "optimizer.betas", "algorithm.group_size"}


def test_a_key_shows_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    for key, rule in (
        ("rollout.ep", "divides rollout.tp"),
        ("algorithm.kl_target", "needs algorithm.kl_beta>0, the initial weight"),
        ("batch.share_prompts", "excludes layout.cp"),
        ("model.grouped_experts", "needs a model with experts"),
    ):
        run(KeyOptions(key=key))
        assert f"    {rule}" in capsys.readouterr().out.splitlines()


def test_every_rule_names_keys_and_their_values(tmp_path: Path) -> None:
    """Conditions are texts, so a renamed key or value would be a rule that never applies."""
    loaded = load(tmp_path, ["model.lora={}"])
    kinds = {key.name: key.kind.split(" | ") for key in find_keys(config.Config)}
    num_rules = 0
    for name, *_, rules in walk(loaded):
        for _, text in rules:
            num_rules += 1
            for term in text.partition(";")[0].partition(",")[0].split(" or "):
                key, _, wanted = term.partition("=")
                key = key.rstrip("!").partition(">")[0]
                assert " " in term or key in kinds, (name, term)
                known = {"true", "false", "null"} if "true" in kinds.get(key, ()) else set(kinds.get(key, ()))
                for value in wanted.split("|") if wanted else ():
                    assert value in known | {"null"} or value.replace(".", "").isdecimal(), (name, term)
    assert num_rules > 100
