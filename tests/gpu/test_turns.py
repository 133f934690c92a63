"""Conversations on the embedded engine of a GPU: turns join a running batch, and a cache holds their contexts."""

from __future__ import annotations

import pytest
import torch

from grpo_mega.distributed.device import Device
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.types import Group, Prompt
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.gpu_policies import SIZES
from tests.helpers.models import make_config
from tests.helpers.scripted_conversations import ScriptedConversations, Talk

STOPS = frozenset({5, 6, 7, 8})
ROUNDING = 1e-4  # nats; a full pass adds in another order than decoding with a cache


@pytest.mark.rehearsed
def test_log_probs_of_turns_equal_a_full_pass_over_their_context(device: Device) -> None:
    hf_config = make_config("qwen2", **SIZES)
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    family, dtype = family_of(shape.model_type), torch.float32
    engine = EmbeddedEngine(hf_config, family, shape, dtype, device, 7, rank=0, world_size=1, verify=False)
    engine.version = 3
    sampling = Sampling(group_size=3, temperature=0.8, max_response_length=50, stop_token_ids=STOPS, seed=11)
    conversations = ScriptedConversations(Talk(shape.vocab, STOPS, sampling.max_response_length))
    prompts = [Prompt(i, "", tuple(range(9, 9 + length)), "") for i, length in enumerate((1, 5, 17))]
    groups = {prompt.id: Group(prompt, []) for prompt in prompts}
    found = engine.generate(RolloutRequest(groups, sampling, 2, conversations=conversations))
    assert engine.failure is None and all(group.is_complete(3) for group in found.values())
    assert len(conversations.turns) > 9, "there are conversations of several turns"
    for request, result in conversations.turns:
        ids, start = torch.tensor([[*request.context_ids, *result.token_ids]]), len(request.context_ids)
        with torch.inference_mode():
            logits = engine._model(input_ids=ids.to(device.torch_device)).logits[0, start - 1 : -1].double().cpu()
        expected = torch.log_softmax(logits / 0.8, dim=-1).gather(1, ids[0, start:, None])[:, 0]
        assert float((torch.tensor(result.logprobs).double() - expected).abs().max()) < ROUNDING
