"""Proof that what a Megatron checkpoint's files hold is what was saved: torch.save keeps a CRC32 of every record."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.megatron_weights import MegatronWeights, SavedRecord
from grpo_mega.formats.sources import Files
from grpo_mega.formats.stream import BLOCK_BYTES
from grpo_mega.observe.progress import progress


def check_records(weights: MegatronWeights, workers: int, show_progress: bool = True) -> None:
    """Read every saved piece of the weights once. Raises WeightMappingError for the first without its CRC32.

    Pieces saved with `torch.serialization.set_crc32_options(False)` have none, and are passed over.
    """
    records = [record for record in weights.records() if record.crc]
    files = Files()
    try:
        total = sum(record.num_bytes for record in records)
        with progress(total, "checking", show_progress, "bytes") as bar, ThreadPoolExecutor(workers) as pool:

            def check(record: SavedRecord) -> None:
                if _crc_of(record, files) != record.crc:
                    raise WeightMappingError(
                        f"{record.path}: {record.name} is damaged: the {record.num_bytes} bytes from {record.offset} on do not "
                        "have the CRC32 that was saved with them; fetch or save the checkpoint again"
                    )
                bar.advance(record.num_bytes)

            list(pool.map(check, records))
    finally:
        files.close()


def _crc_of(record: SavedRecord, files: Files) -> int:
    block, crc, done = memoryview(bytearray(min(BLOCK_BYTES, record.num_bytes))), 0, 0
    while done < record.num_bytes:
        view = block[: record.num_bytes - done]
        files.read_into(record.path, record.offset + done, view)
        crc = zlib.crc32(view, crc)
        done += len(view)
    return crc
