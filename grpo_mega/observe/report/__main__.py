"""Write the report of a run folder at the lowest priority, and print the CPU seconds used."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from grpo_mega import console
from grpo_mega.observe.report import write_report

if __name__ == "__main__":
    console.install()
    os.nice(19)
    write_report(Path(sys.argv[1]))
    print(time.process_time())
