"""Transformer Engine's own Python on a CPU, for tests: its unmodified wheel over an extension emulated in plain torch.

    python -m tests.te_on_cpu.emulated_te.run 2.11.0 MODULE_OR_FILE.py [ARGUMENT ...]   # as __main__
    python -m pytest -p tests.te_on_cpu.emulated_te.plugin --te-version 2.11.0 ...   # tests

`loader` imports TE, `machine` is the emulated card, `extension` replaces the compiled extension, `package` makes the package
under test use TE, and `launcher` starts such processes. The emulation verifies Python code, names, shapes, casts, layouts and
checkpoints. It verifies nothing about kernels, their speed and order of addition, or NCCL. It is not for training.
"""
