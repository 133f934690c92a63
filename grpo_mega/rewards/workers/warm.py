"""Import math-verify and build its parser's tables. The fork server spends this second or two once for all workers.

A worker imports this module too. That costs nothing after the fork server has imported it; otherwise the import reports why it
fails.
"""

import gc

from grpo_mega.rewards.math import accuracy

try:
    accuracy.warm_up()
except Exception as error:
    raise ImportError(f"math-verify cannot be used: {type(error).__name__}: {error}") from error
gc.collect()
gc.freeze()  # keeps these pages shared when a worker collects garbage
