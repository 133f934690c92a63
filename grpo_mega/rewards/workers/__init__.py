"""Reward functions in separate processes, so a check that hangs or dies costs only its deadline."""
