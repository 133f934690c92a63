"""Element types: their safetensors names, used in this package, and their torch names; needs no torch."""

from __future__ import annotations

_TYPES = (  # columns: safetensors name, bytes, torch name, storage class in torch.save files
    ("F64", 8, "float64", "DoubleStorage"),
    ("F32", 4, "float32", "FloatStorage"),
    ("F16", 2, "float16", "HalfStorage"),
    ("BF16", 2, "bfloat16", "BFloat16Storage"),
    ("I64", 8, "int64", "LongStorage"),
    ("I32", 4, "int32", "IntStorage"),
    ("I16", 2, "int16", "ShortStorage"),
    ("I8", 1, "int8", "CharStorage"),
    ("U8", 1, "uint8", "ByteStorage"),
    ("BOOL", 1, "bool", "BoolStorage"),
    ("F8_E4M3", 1, "float8_e4m3fn", None),
    ("F8_E5M2", 1, "float8_e5m2", None),
)
WEIGHTS = ("F64", "F32", "F16", "BF16")  # dtypes of weights that can be converted and trained, widest first
FP8 = "F8_E4M3"  # dtype of block-quantised checkpoints
ITEM_BYTES = {name: size for name, size, _, _ in _TYPES} | {"U64": 8, "U32": 4, "U16": 2, "F8_E8M0": 1}
TORCH_NAMES = {name: torch for name, _, torch, _ in _TYPES}
FROM_TORCH = {torch: name for name, torch in TORCH_NAMES.items()}
STORAGE_NAMES = {name: storage for name, _, _, storage in _TYPES if storage}
FROM_STORAGE = {storage: name for name, storage in STORAGE_NAMES.items()}


def item_bytes(torch_name: str) -> int:
    """Return the bytes per element of the torch dtype with this name."""
    return ITEM_BYTES[FROM_TORCH[torch_name]]
