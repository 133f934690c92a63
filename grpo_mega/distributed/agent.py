"""torchrun with a store that listens on one address: `python -m grpo_mega.distributed.agent TORCHRUN-ARGUMENT ...`.

torchrun's store listens on all addresses. Slurm jobs start their ranks with this module. It takes torchrun's arguments.
The rendezvous must be static, as it is by default.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main

from grpo_mega import console
from grpo_mega.distributed.process_groups import address_to_bind, open_store


def _store(host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **options: Any) -> TCPStore:
    """Return the store of the agents of `world_size` nodes."""
    if not is_master:
        return TCPStore(host, port, world_size, False, timeout, **options)
    address = address_to_bind(
        os.environ | {"MASTER_ADDR": host, "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    )
    return open_store(address, port, timeout, world_size)


if __name__ == "__main__":
    console.filter_output()
    static_tcp_rendezvous.TCPStore = _store  # type: ignore[misc, assignment]  # torchrun opens its store only here
    sys.exit(main())
