"""Find out which optional kernels Megatron loaded, because an installed package may fail to load.

If an import of Transformer Engine fails for lack of a module, Megatron continues without it and silently ignores FP8.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec

from grpo_mega.config import Config
from grpo_mega.distributed.device import Device
from grpo_mega.errors import ConfigError, raise_all
from grpo_mega.preflight import kernels
from grpo_mega.preflight.kernels import Kernels
from grpo_mega.preflight.layout import context_problems
from grpo_mega.preflight.precision import card_problems, kernel_problems


def in_use(device: Device) -> Kernels:
    """Return the kernels that a run on `device` uses."""
    if not device.is_cuda:
        return kernels.choose_kernels(is_cuda=False)
    problem = check_loads()
    from megatron.core import optimizer
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers

    return kernels.choose_kernels(
        is_cuda=True,
        transformer_engine=gpt_layer_specs.HAVE_TE,
        apex_adam=optimizer.Adam.__module__.startswith("apex."),
        apex_weight_gradients=layers._grad_accum_fusion_available,
        problem=problem,
    )


def check_kernels(config: Config, device: Device) -> None:
    """Raise ConfigError if the run needs a kernel that did not load or that this device lacks."""
    raise_all(card_problems(config.precision, device.capability, device.name))
    kernels_in_use, version = in_use(device), kernels.transformer_engine_version()
    if not kernels_in_use.transformer_engine:
        needs = {"precision.fp8": config.precision.fp8, "optimizer.moments_dtype": config.optimizer.moments_dtype}
        reason = kernels_in_use.why if device.is_cuda else "this run is on a CPU"
        for key, value in needs.items():
            if value not in (None, "float32"):
                raise ConfigError(f"{key}={value}: needs Transformer Engine on a GPU, and {reason}; leave {key} out")
        return
    raise_all(context_problems(config))
    raise_all(kernel_problems(config, device.capability, device.name, version, kernels.flash_attention_version()))


@functools.cache
def check_loads() -> str:
    """Return why an installed Transformer Engine does not load; "" if it loads or is not installed.

    Call it before importing megatron.core. Raise ConfigError for an error that would break that import.
    """
    if find_spec("transformer_engine") is None:
        return ""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:  # all of Megatron's modules catch this error, and no other
        return _one_line(error)
    except Exception as error:
        raise ConfigError(
            f"the installed Transformer Engine {kernels.transformer_engine_version() or '(no version)'} does not load "
            f"({_one_line(error)}); run pip install --no-build-isolation 'transformer-engine[pytorch]' after torch, "
            "or pip uninstall it"
        ) from None
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
