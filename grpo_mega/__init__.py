"""grpo_mega: a Megatron-style 3D-parallel trainer for GRPO."""

__version__ = "0.1.0"
