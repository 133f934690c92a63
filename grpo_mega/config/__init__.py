"""The schema of a run's config: sections of pydantic models, read from YAML. Never imports torch.

run.py holds the whole config and the smaller sections. The other modules are named after their sections, and loading.py reads a
file. A rule that needs more than the config itself (files, the model, the machine) is in preflight/.
"""

from grpo_mega.config.algorithm import AlgorithmConfig
from grpo_mega.config.data import DataConfig
from grpo_mega.config.loading import apply_override, dump, load, validate
from grpo_mega.config.model import GuardConfig, ModelConfig, PrecisionConfig, RouterConfig, TeacherConfig
from grpo_mega.config.rewards import RewardsConfig
from grpo_mega.config.rollout import RolloutConfig, SyncConfig
from grpo_mega.config.run import (
    BatchConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    LayoutConfig,
    LogConfig,
    OptimizerConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "GuardConfig",
    "LayoutConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RouterConfig",
    "SyncConfig",
    "TeacherConfig",
    "apply_override",
    "dump",
    "load",
    "validate",
]
