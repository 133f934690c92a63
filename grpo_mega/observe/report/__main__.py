"""Writes the report of the run in the folder that is given, at the lowest priority; prints the seconds that it took."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from grpo_mega.observe.report import write_report

if __name__ == "__main__":
    os.nice(19)
    write_report(Path(sys.argv[1]))
    print(time.process_time())
