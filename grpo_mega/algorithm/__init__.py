"""GRPO's mathematics as pure functions on tensors: advantages, KL penalties, losses, aggregation weights."""
