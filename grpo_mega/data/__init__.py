"""Datasets of prompts, and the order in which a run draws them.

rows.py reads rows from files, folders and the hub, and turns them into messages and gold answers. load.py renders and
tokenises the sets (chat.py handles chat templates), splits off held-out prompts, drops prompts that are too easy or too
hard, and decides the prompts of each step.
"""

from grpo_mega.data.load import RunData, Sampler, load_data, load_prompts

__all__ = ["RunData", "Sampler", "load_data", "load_prompts"]
