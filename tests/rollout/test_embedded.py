"""The embedded engine against transformers: generate() for greedy decoding, a full forward pass for log-probs."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mega.checkpoint_io.reader import open_hf_reader
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.distributed.versions import installed_set
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.embedded.model import checkpoint_tensors
from grpo_mega.rollout.embedded.model import make_model as make_engines_model
from grpo_mega.rollout.engine import RolloutRequest, Sampling, StopCondition
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.apply import buckets, load_shards
from grpo_mega.weights.boxes import region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import hf_shards
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import ModelShape
from tests.helpers.models import FAMILIES, VOCAB_SIZE, make_config, make_model, save_checkpoint

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
LENGTHS = [3, 17, 1, 9, 9, 30, 5, 2]
STOPS = frozenset(range(0, VOCAB_SIZE, 9))  # a ninth of the vocabulary, so random models stop both early and late
SAMPLING = Sampling(group_size=4, temperature=0.8, max_response_length=12, stop_token_ids=STOPS, seed=11)
GREEDY = Sampling(group_size=1, temperature=0.0, max_response_length=12, stop_token_ids=STOPS)


def make_engine(model: Any, max_concurrent: int = 256, read: Any = None) -> EmbeddedEngine:
    """Return an engine with the model's weights, loaded through its shards. `read` returns a box of a checkpoint
    tensor.
    """
    shape = ModelShape.from_hf_config(model.config.to_dict())
    cpu = Device("cpu", torch.device("cpu"))
    engine = EmbeddedEngine(
        model.config,
        family_of(shape.model_type),
        shape,
        model.dtype,
        cpu,
        max_concurrent,
        rank=0,
        world_size=1,
        verify=True,
    )
    parameters = dict(model.named_parameters())
    read = read or (lambda box: parameters[box.tensor][region(box.start, box.shape)])
    load_shards(engine.shard_layout.rank_shards(0), engine.tensors(), read)
    engine.version = 7
    return engine


def generate(
    engine: EmbeddedEngine, prompts: list[Prompt], sampling: Sampling, *, step: int, **others: Any
) -> list[Group]:
    """Return the groups in prompt order."""
    groups = {index: Group(prompt, []) for index, prompt in enumerate(prompts)}
    found = engine.generate(RolloutRequest(groups, sampling, step, **others))
    return [found[i] for i in range(len(prompts))]


def make_prompts() -> list[Prompt]:
    numbers = random.Random(0)
    ids = [tuple(numbers.randrange(VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]
    return [Prompt(id=50 + 3 * i, text="", token_ids=token_ids, answer="") for i, token_ids in enumerate(ids)]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen2", seed=3)


@pytest.fixture(scope="module")
def sampled(model: Any) -> list[Group]:
    return generate(make_engine(model), make_prompts(), SAMPLING, step=2)


def samples_of(groups: list[Group]) -> list[Sample]:
    return [s for g in groups for s in g.samples]


def full_logprobs(model: Any, sample: Sample, temperature: float) -> torch.Tensor:
    """Return [response_len] float64, from one forward pass over the whole sequence."""
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
    logits = model(input_ids=ids).logits[0, len(sample.prompt.token_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_greedy_decoding_equals_transformers_one_by_one(family: str, tied: bool) -> None:
    """With tied weights some layers of qwen2, and all of mistral, have a window below most lengths."""
    windows = {
        "mistral": {"sliding_window": 5},
        "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    }
    model = make_model(family, tied=tied, seed=3, **(windows.get(family, {}) if tied else {}))
    groups = generate(make_engine(model), make_prompts(), GREEDY, step=0)
    reasons = set()
    for group, prompt in zip(groups, make_prompts(), strict=True):
        [sample] = group.samples
        out = model.generate(
            torch.tensor([prompt.token_ids]),
            attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=sorted(STOPS),
            pad_token_id=0,
        )
        assert group.prompt == prompt
        assert sample.response_ids == out[0, len(prompt.token_ids) :].tolist()
        reasons.add(sample.finish_reason)
        found = torch.tensor(sample.rollout_logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, full_logprobs(model, sample, 1.0), rtol=0, atol=1e-5)
    assert reasons == {"stop", "length"}, "the test has become too easy"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"hidden_size": 34, "moe_intermediate_size": 25}),
        ("qwen3_moe", {"moe_intermediate_size": 27}),
        ("mixtral", {"hidden_size": 36, "intermediate_size": 50, "head_dim": 10}),
        ("deepseek_v2", {"moe_intermediate_size": 14}),
        ("deepseek_v3", {"moe_intermediate_size": 22, "q_lora_rank": 10, "rope_parameters": YARN}),
        ("glm4_moe", {"moe_intermediate_size": 22, "use_qk_norm": True}),
        ("qwen3_5_moe_text", {"moe_intermediate_size": 25, "num_experts": 5, "num_experts_per_tok": 3}),
    ],
)
def test_experts_with_unaligned_rows_are_computed_and_recorded(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """torch.grouped_mm refuses such experts. The oracle multiplies in float64 with the weights of each token's
    experts. With these sizes no score of an expert is within 3e-5 of another choice, so rounding decides nothing.
    """
    sampling = replace(SAMPLING, with_routes=True)
    model = make_model(family, seed=3, **changes)
    save_checkpoint(model, tmp_path / "model")
    with open_hf_reader(tmp_path / "model") as reader:
        engine = make_engine(model, read=reader.read)
    groups = generate(engine, make_prompts(), sampling, step=0)
    model.set_experts_implementation("batched_mm")
    model.double()
    blocks = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    chosen: list[torch.Tensor] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1]))
    for sample in samples_of(groups):
        chosen.clear()
        found = torch.tensor(sample.rollout_logprobs, dtype=torch.float64)
        expected = full_logprobs(model, sample, SAMPLING.temperature)
        torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-5)
        expected_experts = torch.stack(chosen, dim=1)[:-1].sort(dim=2)[0].numpy()
        assert sample.routes is not None and (np.sort(sample.routes.experts, axis=2) == expected_experts).all()
    assert len({bytes(s.routes.experts[-1, 0]) for s in samples_of(groups) if s.routes}) > 3, (
        "the test has become too easy"
    )


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_the_notice_that_gpu_kernels_are_missing_is_not_shown_on_a_cpu(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers 5.12 gives it when it builds a model, 5.19 in the first pass of any model."""
    name, ids = family.removesuffix("_text"), torch.tensor([[5, 7, 6]])
    loggers: list[Any] = [
        logging.getLogger(f"transformers.{module}")
        for module in (f"models.{name}.modeling_{name}", "integrations.hub_kernels")
    ]
    for should_warn in (True, False):
        caplog.clear()
        for logger in loggers:
            type(logger).warning_once.cache_clear()
            logger.filters.clear()
        if should_warn:
            make_model(family)(ids)
            assert "fast path" in caplog.text or "reference PyTorch implementation" in caplog.text
            continue
        config = make_config(family)
        shape = ModelShape.from_hf_config(config.to_dict())
        make_engines_model(config, shape, torch.float32, torch.device("cpu"))(ids)
        for logger in loggers:
            logger.warning("another warning")
        assert [record.getMessage() for record in caplog.records] == ["another warning"] * 2


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_an_engine_has_the_tensors_of_a_multimodal_models_checkpoint(family: str) -> None:
    model = make_model(f"{family}_text")
    shape = ModelShape.from_hf_config(model.config.to_dict())
    found = checkpoint_tensors(model, family_of(family), replace(shape, model_type=family))
    expected = family_of(family).hf_tensors(shape)
    assert {name: tuple(found[name].shape) for name in expected} == expected
    assert found.keys() == expected.keys()


def test_the_bias_of_a_router_reaches_a_bf16_engine_in_float32(single_rank: None) -> None:
    """With a rounded bias the engine would select other experts than the trainer."""
    engine = make_engine(make_model("deepseek_v3", dtype=torch.bfloat16), read=lambda box: torch.zeros(box.shape))
    model = make_model("deepseek_v3", seed=5)
    family, shape = family_of("deepseek_v3"), ModelShape.from_hf_config(model.config.to_dict())
    sources = checkpoint_tensors(model, family, shape)
    made = plan_transfers(hf_shards(family, shape, 1), engine.shard_layout, ranks_per_node=1)
    assert not engine.start_update()
    for bucket in buckets(made, sources, dtype=torch.bfloat16, bucket_bytes=999, allocate=engine.allocate):
        engine.load(bucket)
    assert not engine.end_update(8)
    for name, tensor in engine.tensors().items():
        expected = sources[name] if name.endswith("e_score_correction_bias") else sources[name].bfloat16()
        assert torch.equal(tensor, expected) and tensor.dtype == expected.dtype, name


@pytest.fixture
def single_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_deepseek_v2_scales_attention_as_transformers_does_for_deepseek_v3() -> None:
    changes = {"rope_parameters": YARN | {"rope_theta": 10000.0}}
    model, expected = (make_model(family, **changes) for family in ("deepseek_v2", "deepseek_v3"))
    engine = make_engine(model, read=lambda box: torch.zeros(box.shape))
    scales = [one.model.layers[0].self_attn.scaling for one in (model, engine._model, expected)]
    scaled = pytest.approx(scales[2], rel=1e-12)
    assert 16**-0.5 < scales[1] == scaled
    assert scales[0] == (16**-0.5 if installed_set().record == "one" else scaled)


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.8}, {"top_k": 7}, {"temperature": 1.5, "top_p": 0.9, "top_k": 20}])
def test_rollout_logprobs_equal_a_full_pass_before_top_p_and_top_k(model: Any, changes: dict[str, Any]) -> None:
    sampling = replace(SAMPLING, **changes)
    groups = generate(make_engine(model, max_concurrent=16), make_prompts(), sampling, step=1)
    for sample in samples_of(groups):
        found = torch.tensor(sample.rollout_logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, full_logprobs(model, sample, sampling.temperature), rtol=0, atol=1e-5)


def test_groups_come_in_the_prompts_order_and_their_samples_by_index(sampled: list[Group]) -> None:
    assert [g.prompt for g in sampled] == make_prompts()
    assert [[s.index for s in g.samples] for g in sampled] == [[0, 1, 2, 3]] * len(LENGTHS)
    assert all(s.prompt is g.prompt and s.policy_version == 7 for g in sampled for s in g.samples)
    assert all(len({tuple(s.response_ids) for s in g.samples}) > 1 for g in sampled), "samples of a group must differ"


def test_a_response_ends_with_its_stop_token_or_at_the_limit(sampled: list[Group]) -> None:
    stopped = [s for s in samples_of(sampled) if s.finish_reason == "stop"]
    cut = [s for s in samples_of(sampled) if s.finish_reason == "length"]
    assert len({s.response_ids[-1] for s in stopped}) > 2, "every stop token must stop, not only one"
    assert all(s.response_ids[-1] in STOPS and not STOPS & set(s.response_ids[:-1]) for s in stopped)
    assert cut
    assert all(s.response_len == 12 and not STOPS & set(s.response_ids) for s in cut)
    assert all(len(s.rollout_logprobs) == s.response_len for s in stopped + cut)


def test_a_stop_token_in_the_last_place_counts_as_stopped(model: Any) -> None:
    short = replace(SAMPLING, max_response_length=1, group_size=16)
    samples = samples_of(generate(make_engine(model), make_prompts(), short, step=0))
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    assert all((s.finish_reason == "stop") == (s.response_ids[0] in STOPS) for s in samples)


def assert_same_samples(found: list[Group], expected: list[Group]) -> None:
    by_prompt = {g.prompt.id: g for g in expected}
    for group in found:
        for sample, other in zip(group.samples, by_prompt[group.prompt.id].samples, strict=True):
            assert (sample.index, sample.response_ids) == (other.index, other.response_ids)
            assert sample.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-5)


@pytest.mark.parametrize("max_concurrent", [1, 4, 12])
def test_a_sample_is_the_same_however_many_are_decoded_at_once(
    model: Any, sampled: list[Group], max_concurrent: int
) -> None:
    found = generate(make_engine(model, max_concurrent), make_prompts(), SAMPLING, step=2)
    assert_same_samples(found, sampled)


def test_longest_first_gives_the_same_samples_in_the_expected_order(model: Any) -> None:
    prompts, sampling = make_prompts()[:5], replace(SAMPLING, group_size=3, max_response_length=40)
    expected = generate(make_engine(model), prompts, sampling, step=2)
    lengths = [[s.response_len for s in group.samples] for group in expected]
    assert len({group[0] for group in lengths}) == 5, "the test has become too easy"
    for max_concurrent, batches in ((4, 4), (2, 8), (256, 1)):
        stop = StopCondition(Rendezvous(torch.distributed.HashStore(), 0, 1), wanted=5)
        engine = make_engine(model, max_concurrent)
        assert_same_samples(
            generate(engine, prompts, replace(sampling, longest_first=True), step=2, stop=stop), expected
        )
        order = [
            sorted(one for one, at in stop.start_clocks.items() if at == clock)
            for clock in sorted(set(stop.start_clocks.values()))
        ]
        assert list(map(len, order)) == [*([max_concurrent] * batches)[:-1], 15 - max_concurrent * (batches - 1)]
        earlier = list[tuple[int, int]]()
        for batch in order:
            # Expect probes first. Other samples come from the groups with the longest known sample.
            ended = {key: max((lengths[k][i] for k, i in earlier if k == key), default=99) for key in range(5)}
            probes = [(key, 0) for key in range(5) if ended[key] == 99][: len(batch)]
            others = sorted((-ended[k], k, i) for k in range(5) for i in range(3) if (k, i) not in (*earlier, *probes))
            assert batch == sorted([*probes, *((k, i) for _, k, i in others[: len(batch) - len(probes)])])
            earlier += batch


def test_a_sample_does_not_depend_on_the_other_prompts_or_their_order(model: Any, sampled: list[Group]) -> None:
    engine, prompts = make_engine(model), make_prompts()
    shuffled = random.Random(1).sample(prompts, len(prompts))
    for chosen in (shuffled, prompts[::-1], prompts[:3], prompts[3:], prompts[5:6]):
        found = generate(engine, chosen, SAMPLING, step=2)
        assert [g.prompt for g in found] == chosen
        assert_same_samples(found, sampled)


def test_a_sample_depends_on_seed_step_and_prompt_id_not_on_group_size(model: Any, sampled: list[Group]) -> None:
    engine, prompts = make_engine(model), make_prompts()

    def first_responses(step: int = 2, shift: int = 0, **changes: Any) -> list[list[int]]:
        chosen = [replace(p, id=p.id + shift) for p in prompts]
        groups = generate(engine, chosen, replace(SAMPLING, **changes), step=step)
        return [g.samples[0].response_ids for g in groups]

    expected = [g.samples[0].response_ids for g in sampled]
    assert first_responses(group_size=1) == expected
    assert first_responses(seed=12) != expected
    assert first_responses(step=3) != expected
    assert first_responses(shift=1) != expected


def test_on_sample_is_called_once_for_each_sample_as_soon_as_it_has_ended(model: Any) -> None:
    heard: list[Sample] = []

    def hear(sample: Sample, group: Group) -> None:
        assert group.samples[-1] is sample
        whole.extend([group] * (len(group.samples) == SAMPLING.group_size))
        heard.append(sample)

    whole: list[Group] = []
    groups = generate(make_engine(model), make_prompts(), SAMPLING, step=2, on_sample=hear)
    assert sorted(map(id, whole)) == sorted(map(id, groups))
    assert sorted(map(id, heard)) == sorted(map(id, samples_of(groups)))
    lengths = [s.response_len for s in heard]
    assert lengths == sorted(lengths)  # in one batch the shortest response ends first
    assert lengths[0] < lengths[-1]


def test_the_engine_holds_the_weights_and_leaves_the_generator_alone(model: Any) -> None:
    before = torch.get_rng_state()
    engine = make_engine(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert engine.start_update() == []
    assert generate(engine, [], SAMPLING, step=0) == []
