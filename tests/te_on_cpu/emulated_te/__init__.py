"""Transformer Engine's own Python on a CPU, for tests: its unmodified wheel over an extension emulated in plain torch.

    python -m tests.te_on_cpu.emulated_te.run 2.11.0 MODULE_OR_FILE.py [ARGUMENT ...]   # as __main__
    python -m pytest -p tests.te_on_cpu.emulated_te.plugin --te-version 2.11.0 ...   # tests

`loader` imports TE, `machine` is the card that TE then sees, `extension` what it calls, `package` what the package under test
is told, `launcher` how a test starts such processes. The emulation proves paths of Python, names, shapes, casts, layouts and
checkpoints; nothing of kernels, their speed, the order in which they add, or NCCL. It is no way to train.
"""
