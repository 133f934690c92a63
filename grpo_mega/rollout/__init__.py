"""Generate groups of responses with engines that hold a copy of the policy.

From prompt to sample: train.generate -> run.rollout.generate -> phase.Generator.generate (all ranks, until enough groups are
done) -> Engine.generate (this rank's groups). The embedded engine decodes there; an SGLang engine goes on with Client.generate
(which prompts its server takes) -> Session.generate (one streamed request per group), which makes each sample.
"""
