"""The mapping layer: one table per family, used for load, export, weight sync and resume.

A table (families/) says where the tensors of a Hugging Face checkpoint sit in a Megatron rank, as boxes (`boxes.py`). Every
movement of weights is then one act: intersect the boxes of source and target (`transfers.py`), copy the intersections
(`apply.py`). Knows neither Megatron nor SGLang.
"""
