"""rollout.server_args against the parser of the installed SGLang: an argument that changes the policy unseen is refused
under every name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from grpo_mega import config
from grpo_mega.config.rollout import REASONS, server_arg_problem
from grpo_mega.errors import ConfigError

# A separate process, because the import of sglang prints messages when the process ends.
PARSER = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
names = [[list(action.option_strings), action.help or ""] for action in parser._actions]
starts = {option[: n + 1] for options, _ in names for option in options for n in range(2, len(option))}
found = {start: [action[0].option_strings for action in parser._get_option_tuples(start)] for start in sorted(starts)}
json.dump([names, found], sys.stdout)
"""
# Words in arguments that may change tokens or log-probs, or split the engine.
TELLING = re.compile(
    r"sampl|logit|temperature|top[-_ ]?[kp]\b|penalt|specul|draft|lora|truncat|overrid|eagle|diffusion|watermark"
    r"|m(ega|ono)kernel|^\w*([cdept]p_size|parallel)",
    re.I,
)
# Each was checked by reading: kernels, sizes and formats, or no effect without a refused argument.
HARMLESS = """
    cuda_graph_prefill_max_context debug_tensor_dump_output_folder decoupled_spec_bind_endpoint
    decoupled_spec_connect_endpoints decoupled_spec_rank disable_aiter_allreduce_fusion_in_decode
    disaggregation_decode_enable_radix_cache dsa_paged_mqa_logits_backend dsa_topk_backend enable_custom_logit_processor
    enable_draft_weights_cpu_backup enable_fp32_lm_head enable_linear_replayssm_spec enable_return_indexer_topk
    enable_unified_memory experts_shared_outer_loras hicache_size hisparse_config
    linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend log_requests_level lora_backend
    lora_drain_wait_threshold lora_eviction_policy lora_use_virtual_experts
    enable_return_aux_hidden_states max_ep_size
    max_loaded_loras max_lora_chunk_size min_free_slots_delay mm_io_worker_num
    model_loader_extra_config modelexpress_config prefill_delayer_token_usage_low_watermark
    return_aux_hidden_state_layer_ids return_output_ids sampling_backend spec_trace_dir swa_prefix_tails
    trust_request_chat_template default_chat_template_kwargs linear_attn_backend
    """.split()  # noqa: SIM905  # a list of texts is three times as long
# Refused arguments of SGLang 0.5.23 that 0.5.21 does not have.
NEWER = {
    *("enable_hicache", "enable_watermark", "watermark_config", "attn_dp_size", "attention_data_parallel_size"),
    *("enable_paged_experts", "paged_experts_num_resident"),
    *("enable_nvidia_megakernel", "enable_amd_monokernel", "monokernel_backend"),
}
USEFUL = (
    "attention_backend",
    "enable-metrics",
    "fp8_gemm_backend",
    "sampling_backend",
    "kv_cache_dtype",
    "rl_on_policy_target",
)


@dataclass(frozen=True)
class Parser:
    """All names and the help of each argument, and the full names to which prefixes complete."""

    arguments: list[tuple[set[str], str]]
    completions: dict[str, list[set[str]]]


def plain(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


@pytest.fixture(scope="module")
def parser() -> Parser:
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([sys.executable, "-c", PARSER], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    names, found = json.loads(done.stdout.splitlines()[-1])
    arguments = [({plain(option) for option in options if option.startswith("--")}, text) for options, text in names]
    return Parser(
        arguments, {plain(start): [set(map(plain, options)) for options in ends] for start, ends in found.items()}
    )


def test_every_refused_name_is_an_argument_of_the_server(parser: Parser) -> None:
    known = {name for names, _ in parser.arguments for name in names}
    assert REASONS.keys() - known == (set() if "enable_watermark" in known else NEWER)


def test_all_names_of_an_argument_are_refused_or_none(parser: Parser) -> None:
    for names, _ in parser.arguments:
        assert len({server_arg_problem(name) is None for name in names}) == 1, names


def test_a_prefix_that_the_server_completes_to_a_refused_name_is_refused(parser: Parser) -> None:
    refused = [names for names, _ in parser.arguments if any(map(server_arg_problem, names))]
    num_completed = 0
    for start, ends in parser.completions.items():
        if len(ends) == 1 and ends[0] in refused:
            num_completed += 1
            for written in (start, start.replace("_", "-"), f"--{start}"):
                assert server_arg_problem(written), written
    assert num_completed > 500
    assert parser.completions["tp"] == [{"tp_size", "tensor_parallel_size"}], "the parser completes names"


def test_whole_names_of_other_arguments_are_accepted(parser: Parser) -> None:
    names = {name for names, _ in parser.arguments for name in names}
    assert {name.replace("-", "_") for name in USEFUL} <= names
    for name in names - REASONS.keys():
        positive = name.removeprefix("no_")
        assert positive in REASONS or positive.startswith("speculative_") or server_arg_problem(name) is None, name


def test_arguments_that_may_change_sampling_are_refused_or_known(parser: Parser) -> None:
    telling = {name for names, text in parser.arguments for name in names if TELLING.search(f"{name} {text}")}
    allowed = {name for name in telling if server_arg_problem(name) is None}
    assert allowed - {*HARMLESS} <= aliases_of(parser, {*HARMLESS})
    assert {"preferred_sampling_params", "sampling_defaults", "speculative_algorithm", "lora_paths"} <= telling
    assert not {name for name in HARMLESS if server_arg_problem(name)}


def aliases_of(parser: Parser, known: set[str]) -> set[str]:
    return {name for names, _ in parser.arguments if names & known for name in names}


def refusals() -> Iterator[tuple[str, str]]:
    yield "preferred_sampling_params", "changes how tokens are sampled; use rollout.temperature"
    yield "preferred-sampling", "changes how tokens are sampled"
    yield "--sampling-defaults=model", "changes how tokens are sampled"
    yield "Sampling_Defaults", "changes how tokens are sampled"
    yield "tensor_parallel_size", "cuts the engine otherwise"
    yield "tp", "is set by the trainer"
    yield "speculative_draft_model_path", "generates with another model"
    yield "spec", "generates with another model"
    yield "json_model_override_args", "changes the model that generates"
    yield "lora_paths", "adds weights that the trainer does not have"
    yield "enable_hierarchical_cache", "keeps caches beyond a weight sync"
    yield "enable_eplb", "moves experts"
    yield "enable_watermark", "changes how tokens are sampled"
    yield "enable-water", "changes how tokens are sampled"
    yield "attn_dp", "cuts the engine otherwise"
    yield "no-speculative-enable-w4a4-mxfp4-megamoe", "generates with another model"
    yield "no-lora-strict", "is set by the trainer"
    yield "config", "reads further arguments from a file"
    yield "random_seed", "is set by the trainer"


@pytest.mark.parametrize(("name", "says"), list(refusals()))
def test_a_refused_argument_is_one_line_with_its_name(name: str, says: str) -> None:
    raw = {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    with pytest.raises(ConfigError, match=rf"^rollout\.server_args\.{name} {says}[^\n]*; remove it$"):
        config.validate(raw | {"rollout": {"engine": "sglang", "server_args": {name: "1"}}})
    config.validate(raw | {"rollout": {"engine": "sglang", "server_args": dict.fromkeys(USEFUL, "x")}})
