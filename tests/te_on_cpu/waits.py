"""Run tests/megatron/waits_worker.py with Transformer Engine's layers, whose extension only makes shapes here.

python -m tests.te_on_cpu.emulated_te.run 2.11.0 tests/te_on_cpu/waits.py < CASES
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformer_engine.pytorch import utils as te_utils

from grpo_mega.megatron import model
from tests.megatron import waits_worker
from tests.te_on_cpu import rehearse
from tests.te_on_cpu.emulated_te import loader

if __name__ == "__main__":
    rehearse.make_shapes_only()
    # The emulation and the config for CPUs make weights on the host.
    loader._everywhere("canonicalize_device", lambda function: lambda device: torch.device("card", 0))
    te_utils._empty_tensor = lambda: torch.empty(0, device="card")
    patched: Any = model
    for name in ("TransformerConfig", "MLATransformerConfig"):
        plain = partial(lambda make, **fields: make(**fields | {"use_cpu_initialization": False}), getattr(model, name))
        setattr(patched, name, plain)
    waits_worker.main()
