"""Generate groups of responses with engines that hold a copy of the policy.

From prompt to sample: train.generate -> Rollouts.generate_from (rollouts.py) -> Rollouts.generate (all ranks, until
enough groups are done) -> Engine.generate (this rank's groups). The embedded engine decodes there. An SGLang engine
calls Session.generate, which makes each sample with one streamed request per group.

With RolloutRequest.conversations a sample is a conversation of an agent (sessions/). The engine starts it, samples the
turns that it asks for, and reports its end: embedded/engine.py and sglang/turns.py.
"""
