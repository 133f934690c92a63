"""Converting checkpoints between Hugging Face folders and Megatron's distributed format, streaming, and proving the result.

A tensor to be written is described by what it is copied from (`copies.py`), whichever way the conversion goes; bytes are moved
in blocks of a few MiB (`stream.py`), into a folder that gets its name when all of it was read back (`output.py`). Knows the
format, not Megatron: no model is built.
"""
