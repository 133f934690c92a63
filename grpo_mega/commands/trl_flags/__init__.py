"""The flags that users of TRL and open-r1 know, as a config of this trainer.

table.py lists them, each with the key that it sets; parse.py reads a command line; values.py maps values to keys and sources.py
names to models and data sets; command.py puts these together. rewards.py holds the two flags that `grpo-mega train` has too.
"""
