"""Weights on disk: Hugging Face folders and Megatron's distributed checkpoints, read in slices, written, converted, compared.

A tensor to be written is described by the slices that it is copied from (slices.py), whichever way a conversion goes; bytes
move in blocks of a few MiB (stream.py), into a folder that gets its name when all of it was read back (output.py). The format
is known here, Megatron is not: no model is built.
"""
