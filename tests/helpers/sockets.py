"""The TCP sockets on which processes listen, as the kernel reports them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from grpo_mega.processes import descendants

LISTEN = "0A"


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return (address, port) of every socket on which one of the processes listens."""
    inodes = {inode for pid in pids for inode in _sockets_of(pid)}
    return {place for place, inode in _all_listening() if inode in inodes}


def listening_of_tree(process: subprocess.Popen[str], timeout_s: float) -> set[tuple[str, int]]:
    """Watch a process and its descendants until it ends. Return every address on which one of them listened."""
    found: set[tuple[str, int]] = set()
    until = time.monotonic() + timeout_s
    while process.poll() is None:
        assert time.monotonic() < until, "the process does not end"
        found |= listening([process.pid, *descendants(process.pid)])
        time.sleep(0.05)
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _sockets_of(pid: int) -> Iterable[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").removesuffix("]")


def _all_listening() -> Iterable[tuple[tuple[str, int], str]]:
    """Yield ((address, port), inode) of each listening socket."""
    for name in ("tcp", "tcp6"):
        for row in (line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]):
            if row[3] == LISTEN:
                address, _, port = row[1].partition(":")
                yield (_address(address), int(port, 16)), row[9]


def _address(text: str) -> str:
    """Return the address for hexadecimal words in the machine's byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
