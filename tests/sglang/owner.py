"""Own a server until this process is killed: `python owner.py MODEL FOLDER TP`. Prints address and key when it is
ready.
"""

import sys
import time
from pathlib import Path

from grpo_mega.rollout.sglang.server import Server
from tests.helpers.servers import make_settings, running

model, folder, tp = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with running(Server(make_settings(model, folder, tp=tp))) as server:
    server.wait_until_healthy()
    print(server.url, server.key, flush=True)
    time.sleep(600)
