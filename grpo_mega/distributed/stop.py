"""Stop a run between steps: on SIGTERM or SIGINT to any rank, or when a file RUN_DIR/stop appears.

A signal only sets a flag. `requested` is collective, so all ranks stop after the same step.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from grpo_mega.paths import STOP_FILE


class StopRequest:
    """A request to stop. Once this object exists, SIGTERM and SIGINT set a flag and do not end the process."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / STOP_FILE
        self._is_raised = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._raise)

    def requested(self) -> bool:
        """Return True if any rank got a signal or sees the file. The result is identical on all ranks."""
        flag = torch.tensor([int(self._is_raised or self._file.exists())])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def clear(self) -> None:
        """Remove the file, so the next start does not stop at once."""
        self._file.unlink(missing_ok=True)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._is_raised = True
