"""Import math-verify and build its parser's tables: one to two seconds, spent once by the fork server, not by each worker.

A worker imports this module as well, which costs nothing where the fork server has it, and otherwise says why it cannot.
"""

import gc

from grpo_mega.rewards.math import accuracy

try:
    accuracy.warm_up()
except Exception as error:
    raise ImportError(f"math-verify cannot be used: {type(error).__name__}: {error}") from error
gc.collect()
gc.freeze()  # so that a worker's garbage collection leaves these pages shared
