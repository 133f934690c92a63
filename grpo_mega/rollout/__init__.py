"""Generate groups of responses with engines that hold a copy of the policy.

From prompt to sample: train.generate -> run.rollout.generate -> phase.Generator.generate (all ranks, until enough groups are
done) -> Engine.generate (this rank's groups). The embedded engine decodes there. An SGLang engine calls Client.generate, which
chooses the server's prompts, and then Session.generate, which makes each sample with one streamed request per group.
"""
