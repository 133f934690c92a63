"""Data sets of prompts and the order in which a run draws them."""

from grpo_mega.data.dataset import DatasetReport, load_prompts
from grpo_mega.data.sampler import PromptSampler

__all__ = ["DatasetReport", "PromptSampler", "load_prompts"]
