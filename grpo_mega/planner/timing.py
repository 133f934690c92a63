"""Time of a step by phase, from peak rates and the stated shares of them.

Model FLOPs are counted as usual: a product of [m, k] and [k, n] is 2 m k n, a backward pass twice the forward; what is computed
again for recompute, and the fourth product of the log-probs, is work but not utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.planner.batch import Batch
from grpo_mega.planner.communication import Link, layers_a_stage, num_passes, tokens_a_rank
from grpo_mega.planner.engine import EngineMemory, cache_bytes_per_token, sequences_per_engine
from grpo_mega.planner.figures import Figure, Number, figure, total
from grpo_mega.planner.setup import Setup
from grpo_mega.planner.state import State


@dataclass(frozen=True)
class Timing:
    phases: list[Figure]  # seconds, in the order of a step
    step: Figure
    tokens_per_second_per_gpu: Figure
    model_flops_share: Figure  # of the bf16 peak, in updates


def timing(setup: Setup, batch: Batch, links: list[Link], state: State, engine: EngineMemory) -> Timing:
    sampling = _sampling(setup, engine)
    compute = _layer_seconds(setup, batch)
    output = _output_seconds(setup, batch)
    by_kind = {link.kind: link.seconds.value for link in links}
    within = by_kind.get("tensor parallel", 0.0) + by_kind.get("experts", 0.0)
    updates, forwards = num_passes(setup)
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[setup.config.model.recompute]
    passes = (3 + again) * updates + forwards
    layout = setup.layout
    # Interleaved stages overlap their sends; otherwise they are waited for.
    pipeline = 0.0 if layout.vpp > 1 else by_kind.get("pipeline", 0.0)
    stage: dict[str, Number | Figure] = {
        "layers": compute,
        "output": output,
        "bubble": batch.bubble,
        "last": _layers_of_last_stage(setup),
    }
    update_share = (3 + again) * updates / passes
    logprobs = figure(
        "log-probs",
        "s",
        "forwards * max(layers, last * layers + output) / (1 - bubble) + (within + pipeline) * share",
        stage,
        forwards=forwards,
        within=within,
        pipeline=pipeline,
        share=1 - update_share,
    )
    update = figure(
        "update",
        "s",
        "updates * max((3 + again) * layers, (3 + again) * last * layers + 4 * output) / (1 - bubble)"
        " + (within + pipeline) * share + reduce + adam",
        stage,
        updates=updates,
        again=again,
        within=within,
        pipeline=pipeline,
        share=update_share,
        reduce=_exposed(setup, by_kind.get("gradients and weights", 0.0)),
        adam=_adam_seconds(setup, state),
    )
    phases = [sampling, logprobs, update, *_moves(setup, state, by_kind.get("sync to the engines", 0.0)), _overhead(setup)]
    step = total("a step", "s", phases)
    return Timing(phases, step, _rate(setup, batch, step), _flops_share(setup, batch, update))


def _rate(setup: Setup, batch: Batch, step: Figure) -> Figure:
    return figure(
        "tokens a second a GPU",
        "",
        "tokens / (step * gpus)",
        tokens=batch.tokens,
        step=step,
        gpus=setup.world_size,
    )


def _flops_share(setup: Setup, batch: Batch, update: Figure) -> Figure:
    return figure(
        "model FLOPs of the update, of the bf16 peak",
        "",
        "3 * flops * updates / (update * gpus * peak)",
        flops=model_flops(setup, batch),
        updates=num_passes(setup)[0],
        update=update,
        gpus=setup.world_size,
        peak=setup.card.bf16_flops,
    )


def layer_weights(setup: Setup) -> int:
    """Weights of one layer that multiply a token."""
    s = setup.shape
    attention = s.hidden * (s.q + 2 * s.kv) + s.q * s.hidden
    if s.num_experts:
        return attention + s.hidden * s.num_experts + setup.experts_per_token * 3 * s.hidden * s.moe_ffn
    return attention + 3 * s.hidden * s.ffn


def model_flops(setup: Setup, batch: Batch) -> float:
    """One forward pass over a step's tokens; only responses go through the output layer."""
    s = setup.shape
    linear = 2 * s.num_layers * layer_weights(setup) * batch.tokens.value
    attention = 2 * s.q * setup.mean_sample * s.num_layers * batch.tokens.value
    output = 2 * s.hidden * s.vocab * batch.samples.value * setup.mean_response
    return linear + attention + output


def _layer_seconds(setup: Setup, batch: Batch) -> Figure:
    """One forward pass of a step's tokens through the layers of the fullest stage."""
    precision, card, assumed, n = setup.config.precision, setup.card, setup.assumed, setup.shape.num_layers
    in_fp8 = 0.0
    if precision.fp8 is not None:
        in_fp8 = max(0, n - precision.first_layers_bf16 - precision.last_layers_bf16) / n
    spread = assumed.expert_imbalance if setup.layout.ep > 1 else 1.0
    return figure(
        "layers, forward",
        "s",
        "layers * tokens / tp * (2 * weights * imbalance * ((1 - in_fp8) / (bf16 * matmul_share)"
        " + in_fp8 / (fp8 * fp8_share)) + 2 * q * length / (bf16 * attention_share))",
        layers=layers_a_stage(setup),
        tokens=tokens_a_rank(setup, batch),
        tp=setup.layout.tp,
        weights=layer_weights(setup),
        imbalance=spread,
        in_fp8=in_fp8,
        bf16=card.bf16_flops,
        matmul_share=assumed.matmul_share,
        fp8=card.fp8_flops or card.bf16_flops,
        fp8_share=assumed.fp8_matmul_share,
        q=setup.shape.q,
        length=setup.mean_sample,  # causal: on average a token sees half of it
        attention_share=assumed.attention_share,
    )


def _layers_of_last_stage(setup: Setup) -> float:
    """To those of the fullest."""
    layout, n = setup.layout, setup.shape.num_layers
    return sum(len(layout.layers_of(n, layout.pp - 1, chunk)) for chunk in range(layout.vpp)) / layers_a_stage(setup)


def _output_seconds(setup: Setup, batch: Batch) -> Figure:
    """One product of the responses' hidden states with the output weight, which the last stage does beside its layers."""
    return figure(
        "output layer, forward",
        "s",
        "2 * tokens * hidden * vocab / tp / (bf16 * share)",
        tokens=batch.samples.value * setup.mean_response / setup.layout.dp,
        hidden=setup.shape.hidden,
        vocab=setup.shape.vocab,
        tp=setup.layout.tp,
        bf16=setup.card.bf16_flops,
        share=setup.assumed.logprob_share,
    )


def _exposed(setup: Setup, seconds: float) -> float:
    hidden = setup.assumed.overlap_share
    layout = setup.config.layout
    return seconds * (1 - hidden * (0.5 * layout.overlap_grad_reduce + 0.5 * layout.overlap_param_gather))


def _adam_seconds(setup: Setup, state: State) -> float:
    touched = 2 * (state.master_bytes + state.moment_bytes) + 4 + setup.itemsize
    rate = setup.card.hbm_bytes * setup.assumed.hbm_share
    return setup.config.batch.optimizer_steps * (state.largest_share * touched + state.gradients) / rate


def _sampling(setup: Setup, engine: EngineMemory) -> Figure:
    """Full batches until the sequences are used up, then a tail in which the longest responses end."""
    shape, card, assumed = setup.shape, setup.card, setup.assumed
    tp = setup.config.rollout.tp if setup.is_served else 1
    layer = assumed.decode_layer_s + (2 * assumed.all_reduce_s if tp > 1 else 0.0)
    active = 2 * shape.num_layers * layer_weights(setup) + 2 * shape.hidden * shape.vocab
    return figure(
        "sampling",
        "s",
        "prefill + ceil(sequences / concurrent) * response * (overhead + max((weights + concurrent * context * per_token)"
        " / hbm, concurrent * flops / tp / peak)) + (longest - response) * (overhead + weights / hbm)",
        prefill=sequences_per_engine(setup)
        / setup.config.algorithm.group_size
        * setup.mean_prompt
        * active
        / (tp * card.bf16_flops * assumed.prefill_share),
        sequences=sequences_per_engine(setup),
        concurrent=engine.concurrent,
        response=setup.mean_response,
        overhead=assumed.decode_step_s + shape.num_layers * (layer if setup.is_served else assumed.embedded_layer_s),
        weights=engine.weights,
        context=setup.mean_prompt + setup.mean_response / 2,
        per_token=cache_bytes_per_token(setup),
        hbm=card.hbm_bytes * assumed.hbm_share,
        flops=active,
        tp=tp,
        peak=card.bf16_flops * assumed.prefill_share,
        longest=setup.config.rollout.max_response_length,
    )


def _moves(setup: Setup, state: State, sync: float) -> list[Figure]:
    rate = setup.card.host_bytes * setup.assumed.host_share
    moves = int(setup.keeps_host_copies)
    reference = int(setup.has_reference)
    return [
        figure(
            "offload and onload",
            "s",
            "(2 * moves * (weights + optimizer) + 3 * reference * weights) / rate",
            moves=moves,
            weights=state.weights,
            optimizer=state.largest_share * (state.master_bytes + state.moment_bytes),
            reference=reference,
            rate=rate,
        ),
        figure("sync", "s", "sync", sync=sync),
    ]


def _overhead(setup: Setup) -> Figure:
    return figure("everything else", "s", "overhead", overhead=setup.assumed.step_overhead_s)
