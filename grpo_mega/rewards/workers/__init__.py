"""Reward functions in processes of their own, so that a check that hangs or dies costs its deadline and nothing else."""
