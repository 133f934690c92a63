"""The mapping layer: one table per family, used for load, export, weight sync and resume.

A table (families/) maps the tensors of a Hugging Face checkpoint to a Megatron rank, as boxes (`boxes.py`). Every
movement of weights is then one operation: intersect the boxes of source and target (`transfers.py`), copy the
intersections (`apply.py`). This package imports neither Megatron nor SGLang.
"""
