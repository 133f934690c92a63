"""The flags of TRL and open-r1, as a config of this trainer.

flags.py lists the flags and reads a command line. values.py maps their values to config keys, and sources.py maps names to
models and data sets. command.py combines these. rewards.py holds the two flags that `grpo-mega train` has too.
"""
