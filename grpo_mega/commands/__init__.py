"""The commands of `grpo-mega` beside train: eval, export, check, plan, and the flags of TRL and open-r1."""
