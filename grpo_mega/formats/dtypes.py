"""Names of element types, as safetensors writes them, and what else they are called; needs no torch."""

from __future__ import annotations

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
WEIGHTS = ("F64", "F32", "F16", "BF16")  # what converted weights may be
FP8 = "F8_E4M3"  # what block-quantised checkpoints are stored in
TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
FROM_TORCH = {name: dtype for dtype, name in TORCH_NAMES.items()}
STORAGE_NAMES = {  # of torch, in what torch.save writes
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}
FROM_STORAGE = {name: dtype for dtype, name in STORAGE_NAMES.items()}


def item_bytes(torch_name: str) -> int:
    """Return the bytes of an element of torch's dtype of that name."""
    return ITEM_BYTES[FROM_TORCH[torch_name]]
