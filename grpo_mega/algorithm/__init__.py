"""The mathematics of GRPO as pure functions on tensors: advantages, KL penalties, losses, token weights, log-probs."""
