"""The sections of a config for generation, with the refused server arguments, and for the weight sync to the
engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from grpo_mega.config.base import (
    LIST,
    Fraction,
    NonNegativeInt,
    NumRanks,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    free,
    ruled,
)

BUILT_IN_TOOLS = {"python": "grpo_mega.rewards.code.python"}  # functions of rollout.tools by name
_AGENTS = "rollout.agent or rollout.tools, whose samples are generated whole"
_OF_AGENTS = "rollout.agent or rollout.tools; leave it out"


_ALL_TOKENS = "a training step, whose log-probs are over all tokens; use eval.top_p or grpo-mega sample"


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = ruled(
        needs="the package sglang; see grpo_mega/rollout/sglang/README.md, or use embedded",
        excludes="missing support in SGLang; use embedded",
        default="embedded",
        description="What generates: embedded runs inside the trainer's ranks, sglang starts SGLang servers.",
    )
    tp: NumRanks = free(
        needs="rollout.engine=sglang, because the embedded engine spans one rank",
        default=1,
        description="Ranks per engine: rank r belongs to engine r // tp. Must be 1 for the embedded engine.",
    )
    ep: NumRanks = free(
        divides="rollout.tp", default=1, description="Expert-parallel size inside an engine. Must divide tp."
    )
    placement: Literal["colocated", "separate"] = free(
        needs="layout.engine_ranks, ranks that only generate",
        excludes=_AGENTS,
        default="colocated",
        description=(
            "colocated generates and trains on the same ranks in turns. separate generates on layout.engine_ranks"
            " ranks while the others train."
        ),
    )
    temperature: PositiveFloat = ruled(
        excludes="a teacher's url, because servers return log-probs of given tokens only at temperature 1",
        default=1.0,
        description="Sampling temperature.",
    )
    top_p: Fraction = ruled(
        excludes=_ALL_TOKENS,
        default=1.0,
        description=(
            "Sample from the smallest set of tokens with this total probability among all tokens. 1 uses all tokens. "
            "Training needs 1. With top_k, a token must be in both sets."
        ),
    )
    top_k: NonNegativeInt = ruled(
        excludes=_ALL_TOKENS,
        default=0,
        description="Sample from this many most likely tokens. 0, as training needs it, uses all tokens.",
    )
    max_response_length: PositiveInt = Field(default=1024, description="Maximum number of tokens in a response.")
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], LIST] = Field(
        default=(),
        description=(
            "Token ids that end a response, in addition to the eos ids of the model, its generation config and "
            "the tokenizer. Rewards see the text of a token that is named only here."
        ),
    )
    max_concurrent: PositiveInt = free(
        default=256, description="Maximum number of sequences that an engine decodes at once."
    )
    oversample: Annotated[float, Field(ge=1, le=1000)] = ruled(
        needs="rollout.placement=colocated or rollout.max_staleness=0, which set how much is started; leave it out",
        excludes=_AGENTS,
        default=1.0,
        description=(
            "Start this many times batch.prompts_per_step prompts, and abort the rest when enough groups are "
            "complete. Saves time if few responses are long, but prefers short responses (rollout/kept_length, "
            "aborted_length)."
        ),
    )
    partial: bool = ruled(
        needs="rollout.oversample>1, or nothing is left to continue; use 1.25",
        excludes=("rollout.placement=separate, which always continues", "rollout.max_staleness=0; raise it", _AGENTS),
        default=False,
        description=(
            "Keep aborted groups and resume them in the next step with the updated policy, so that no length is "
            "preferred. Needs oversample > 1. Use algorithm.recipe=partial to correct for it."
        ),
    )
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = free(
        default=2,
        description=(
            "Maximum number of policy updates between a group's first token and its training step. Used with "
            "partial and with placement=separate, where 1 runs one step ahead and 0 alternates."
        ),
    )
    longest_first: bool = free(
        needs="rollout.partial=true or rollout.oversample=1.0, or short samples are always aborted",
        excludes=_AGENTS,
        default=False,
        description=(
            "Start one sample per group as a length probe, then start the remaining samples of the groups with "
            "the longest probes. Shortens a rollout with more sequences than max_concurrent if lengths within a "
            "group are similar. Does not change any sample."
        ),
    )
    dtype: Literal["float32", "bfloat16"] | None = free(
        default=None, description="Dtype of the engine's weights and computation. None uses model.dtype."
    )
    quantization: Literal["fp8"] | None = ruled(
        excludes=("linear attention, which computes decays from small matrices", "latent attention in SGLang"),
        default=None,
        description=(
            "Quantization of the engine's linear layers. fp8 sends them in blocks of 128 x 128, None does not quantize."
        ),
    )
    routing_replay: bool | Literal["reference"] = free(
        needs="a model with experts",
        excludes=("model.router.capacity_factor, which drops tokens that the engine sends to experts", _AGENTS),
        default=False,
        description=(
            "Train each token of an MoE model with the experts that the engine chose for it (R3). reference "
            "replays them in the reference too."
        ),
    )
    cache_tokens: PositiveInt | None = free(
        default=None,
        description=(
            "Tokens in the KV cache of an SGLang server. None uses what max_concurrent needs on a CPU, and what "
            "fits on a GPU."
        ),
    )
    memory_fraction: Fraction | None = free(
        default=None,
        description=(
            "Share of GPU memory for the weights and KV cache of an SGLang server. None uses the server's default."
        ),
    )
    sleep: Literal["auto", "always", "never"] = free(
        default="auto",
        description=(
            "Whether an SGLang server frees its GPU memory while the trainer runs. auto frees it unless both fit."
        ),
    )
    max_restarts: NonNegativeInt = free(
        default=3,
        description="Maximum number of restarts per SGLang server and run. The run then stops with a checkpoint.",
    )
    start_deadline_s: Seconds = free(
        default=900.0, description="Maximum number of seconds until an SGLang server answers after its start."
    )
    stall_deadline_s: Seconds = free(
        default=60.0,
        description=(
            "Restart an SGLang server that has neither finished a sample nor answered a health check for this "
            "many seconds."
        ),
    )
    phase_deadline_s: Seconds = free(
        default=14400.0, description="Maximum number of seconds of one generation phase of an SGLang server."
    )
    mismatch_warn: PositiveFloat = free(
        at_most="rollout.mismatch_stop",
        default=0.02,
        description="Warn if the KL (k3) between engine and trainer exceeds this many nats per token.",
    )
    mismatch_stop: PositiveFloat | None = free(
        default=1.0,
        description=(
            "Stop the run if the KL (k3) between engine and trainer exceeds this many nats per token. None never stops."
        ),
    )
    server_args: dict[str, str | int | float | bool] = free(
        default={}, description="Additional arguments of the SGLang server, by SGLang's names."
    )
    agent: str | None = Field(
        default=None,
        description=(
            "Your own agent, `async def run(chat, prompt) -> float | dict[str, float] | None`, as module.function or "
            "file.py:function. It runs once per sample. None generates one response per sample, or uses tools."
        ),
    )
    tools: Annotated[tuple[str, ...], LIST] = ruled(
        excludes="rollout.agent, which has its own",
        default=(),
        description=(
            "Python functions that the model may call, as module.function or file.py:function, with type hints and a "
            "docstring. python runs code in a sandbox. A sample ends with a turn that calls no tool."
        ),
    )
    max_turns: PositiveInt = ruled(
        needs=_OF_AGENTS,
        default=8,
        description="Maximum number of assistant turns in a sample. Used with agent or tools.",
    )
    tool_timeout_s: Seconds = free(
        needs=_OF_AGENTS,
        default=30.0,
        description="Maximum number of seconds of one tool call. The model is told that a call was late.",
    )
    agent_timeout_s: Seconds = free(
        needs=_OF_AGENTS,
        default=600.0,
        description="Maximum number of seconds of one sample's conversation, generation included.",
    )
    agent_workers: PositiveInt = free(
        needs=_OF_AGENTS,
        default=1,
        description="Number of processes per engine that run agents and tools, each for many samples.",
    )
    tool_format: Literal["auto", "hermes", "glm45", "qwen3_coder", "llama3", "mistral"] = ruled(
        needs=_OF_AGENTS,
        default="auto",
        description=(
            "How the model writes tool calls: hermes (<tool_call> and JSON, also Qwen 2.5 and 3), glm45 or qwen3_coder "
            "(<tool_call> and XML, the latter also Qwen 3.5), llama3 (JSON) or mistral ([TOOL_CALLS]). auto finds it "
            "from the chat template."
        ),
    )

    @property
    def has_agents(self) -> bool:
        """True if samples are conversations of an agent or with tools."""
        return self.agent is not None or bool(self.tools)

    @property
    def is_served(self) -> bool:
        """True if SGLang servers generate."""
        return self.engine == "sglang"

    @property
    def is_separate(self) -> bool:
        return self.placement == "separate"

    @property
    def keeps_unfinished(self) -> bool:
        """True if unfinished or surplus complete groups of a step continue in the next one."""
        return self.partial or (self.is_separate and self.max_staleness > 0)

    def num_started(self, prompts_per_step: int) -> int:
        """Return the number of prompts that a step starts or continues."""
        if self.is_separate and self.keeps_unfinished:
            return (1 + self.max_staleness) * prompts_per_step
        return math.ceil(round(prompts_per_step * self.oversample, 6))

    def num_ahead(self, prompts_per_step: int) -> int:
        """Return the number of prompts that are started or continued while a step trains."""
        return self.max_staleness * prompts_per_step if self.is_separate else 0

    def _problems(self) -> Iterator[str]:
        for name in self.server_args:
            if (problem := server_arg_problem(name)) is not None:
                yield f"rollout.server_args.{name} {problem}; remove it"
        for name in {name for name in self.tools if self.tools.count(name) > 1}:
            yield f"rollout.tools names {name!r} twice; give it once"


class SyncConfig(Section):
    bucket_mib: PositiveFloat = Field(
        default=256.0,
        description="MiB of weights that a rank sends at once. A rank has up to five such buckets.",
    )
    verify: bool = Field(
        default=True, description="Compare checksums of the engine's and the trainer's weights after every sync."
    )
    lora: Literal["merged", "adapter"] | None = ruled(
        needs="model.lora; leave it out",
        default=None,
        description=(
            "What a sync sends with model.lora: all weights with the adapter merged, or only the adapter, for SGLang. "
            "None sends the adapter if engine and model support it."
        ),
    )


# Arguments of SGLang 0.5.21 and 0.5.23 are refused if they change tokens or log-probs without the trainer's knowledge,
# keep weights or caches of another policy, or split the engine differently from the weights it receives. Aliases count.
# So do prefixes of a name, because SGLang's parser completes them, and a name after "no-".
_SPECULATION = "generates with another model or method that does not get the policy's weights"
REASONS = {
    name: reason
    for reason, names in {
        "changes how tokens are sampled; use rollout.temperature": (
            """
            preferred_sampling_params sampling_defaults allow_auto_truncate sampling_mask_max_tokens
            enable_strict_thinking mlx_enable_sampling enable_watermark watermark_config
        """
        ),
        _SPECULATION: (
            """
            enable_multi_layer_eagle uno_lora_path decoupled_spec_role dllm_algorithm dllm_algorithm_config dllm_fdfo
        """
        ),
        "changes the model that generates; use the files of model.path, rollout.dtype or rollout.quantization": (
            """
            json_model_override_args model_config_parser model_impl revision is_embedding quantization
            quantization_param_path modelopt_quant quantize_and_serve modelopt_checkpoint_restore_path rl_quant_profile
            startup_weight_load_mode decrypted_config_file decrypted_draft_config_file delete_ckpt_after_loading
            weight_cache_mode weight_version model forward_hooks debug_tensor_dump_input_file
        """
        ),
        "adds weights that the trainer does not have; merge them into model.path": (
            """
            lora_paths enable_lora_overlap_loading
        """
        ),
        "keeps caches beyond a weight sync, so that tokens would come from an older policy's": (
            """
            enable_hierarchical_cache enable_hicache hicache_storage_backend enable_lmcache enable_flexkv
            enable_unified_cache_external_linker disaggregation_mode enable_nvidia_megakernel enable_amd_monokernel
            monokernel_backend
        """
        ),
        "moves experts to where a weight sync does not send them": (
            """
            enable_eplb ep_num_redundant_experts init_expert_location elastic_ep_backend kt_weight_path
            enforce_shared_experts_fusion enable_paged_experts paged_experts_num_resident
        """
        ),
        "cuts the engine otherwise than its weights are sent; use rollout.tp, rollout.ep and more ranks": (
            """
            tensor_parallel_size ep expert_parallel_size pp_size pipeline_parallel_size dp_size data_parallel_size
            dcp_size decode_context_parallel_size attn_cp_size attention_context_parallel_size moe_dp_size
            moe_data_parallel_size dwdp_size nnodes node_rank dist_init_addr nccl_init_addr gpu_id_step
            enable_dp_attention enable_dp_lm_head enable_prefill_cp moe_dense_tp_size enable_dense_mlp_attn_tp
            enable_shared_experts_attn_tp shared_experts_tp_size attn_dp_size attention_data_parallel_size
        """
        ),
        "reads further arguments from a file; give them here": "config",
        "is set by the trainer": (
            """
            host port api_key nccl_port served_model_name model_path load_format custom_weight_loader
            skip_tokenizer_init device dtype tp_size ep_size disable_shared_experts_fusion base_gpu_id context_length
            max_running_requests max_total_tokens mem_fraction_static enable_memory_saver random_seed
            enable_return_routed_experts admin_api_key incremental_streaming_output enable_lora max_lora_rank
            lora_target_modules max_loras_per_batch lora_strict_loading enable_weights_cpu_backup
        """
        ),
    }.items()
    for name in names.split()
}
_SPECULATIVE = "speculative_"  # prefix of further refused arguments


def server_arg_problem(name: str) -> str | None:
    """Return the reason why a server argument of this name is not allowed; None if it is."""
    plain = name.strip("-").replace("-", "_").lower().removeprefix("no_").partition("=")[0]
    if plain in REASONS:
        return REASONS[plain]
    if plain.startswith(_SPECULATIVE):
        return _SPECULATION
    completed = {_SPECULATIVE: _SPECULATION, **REASONS}
    return next((reason for full, reason in completed.items() if full.startswith(plain)), None)
