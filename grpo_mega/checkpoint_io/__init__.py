"""Weights on disk: Hugging Face folders and Megatron's distributed checkpoints, read in slices, written, converted,
compared.

A tensor to write is described by its source slices (slices.py), for either direction of a conversion. `reader.py` reads
all weights, in blocks for a conversion and in boxes for a rank. `output.py` writes a folder that gets its name only
after everything was read back. This package knows the file formats but does not need Megatron: it builds no model.
"""
