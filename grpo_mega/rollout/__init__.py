"""Generate response groups using engines that hold a policy copy.

From prompt to sample: train.generate -> Rollouts.generate_from (rollouts.py) -> Rollouts.generate (all ranks, until
enough groups are done) -> Engine.generate (this rank's groups). The embedded engine decodes there. An SGLang engine
calls ServerClient.generate, which streams one request per group.

With RolloutRequest.conversations a sample is an agent conversation (sessions/). The engine starts it, generates the
turns that the agent requests, and reports its end: embedded/engine.py and sglang/turns.py.
"""
