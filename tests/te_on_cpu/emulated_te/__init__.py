"""Transformer Engine's real Python on a CPU, for tests: its unmodified wheel over an extension emulated in plain torch.

    python -m tests.te_on_cpu.emulated_te.run 2.11.0 MODULE_OR_FILE.py [ARGUMENT ...]   # as __main__
    python -m pytest -p tests.te_on_cpu.emulated_te.plugin --te-version 2.11.0 ...   # tests

`loader` imports TE. `machine` is the card that TE then sees. `extension` has the functions that TE calls. `package`
makes the package under test use TE. `launcher` starts processes on the emulation. The emulation verifies Python paths,
names, shapes, casts, layouts and checkpoints. It does not verify kernels, their speed, their order of additions, or
NCCL. Never train with it.
"""
