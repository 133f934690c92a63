"""Data sets of prompts and the order in which a run draws them.

sources.py reads rows from files, folders and the hub; rows.py checks them; dataset.py renders and tokenises one set (chat.py
knows chat templates); load.py puts a run's sets together, split.py splits held-out prompts off, and pass_rates.py drops what is
too easy or too hard; sampler.py and order.py say which prompts a step draws; tokenizer_files.py checks a tokenizer's files
before anything heavy is imported.
"""

from grpo_mega.data.dataset import DatasetReport, load_prompts
from grpo_mega.data.load import RunData, load_data
from grpo_mega.data.sampler import MixedSampler, PromptSampler, Sampler

__all__ = ["DatasetReport", "MixedSampler", "PromptSampler", "RunData", "Sampler", "load_data", "load_prompts"]
