"""Facts about the machine and its libraries that Transformer Engine reads from its extension."""

from __future__ import annotations


def get_cublasLt_version() -> int:
    return 120903


def get_num_cublas_streams() -> int:
    return 4


def device_supports_multicast(device_id: int = -1) -> bool:
    return False


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    return 0, -5


def ubuf_built_with_mpi() -> bool:
    return False
