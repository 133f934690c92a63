"""Run SGLang's code for FP8 blocks, with stubbed imports: `python blocks_in_sglang.py MODEL ARGUMENT ...`.

The arguments are a server's, but no server starts, because SGLang computes with blocks only on GPUs. The code that
handles the blocks after a load is plain Python and runs here as on a GPU with Triton's kernels. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from grpo_mega.rollout.sglang import loader, server_main


def shuffle(layer: Any) -> None:
    """Reorder values in place, like kernels that need another order: shape and type stay the same."""
    layer.weight.data.copy_(layer.weight.data.flip(0))


def pack(layer: Any) -> None:
    """Change the scales' dtype, like DeepGEMM on Blackwell."""
    layer.weight_scale_inv.data = layer.weight_scale_inv.data.to(torch.int32)


def make_layer(method: Any, rows: int, cols: int) -> torch.nn.Module:
    layer = torch.nn.Module()
    method.create_fp8_weight_(
        layer,
        block_quant=method.block_quant,
        quant_config=method.quant_config,
        use_mxfp8=method.use_mxfp8,
        output_size_per_partition=rows,
        input_size_per_partition=cols,
        output_partition_sizes=[rows],
        input_size=cols,
        output_size=rows,
        params_dtype=torch.bfloat16,
        weight_loader=None,
        is_checkpoint_fp8_serialized=method.is_checkpoint_fp8_serialized,
        skip_block_quant_check=True,
    )
    layer.quant_method = method
    return layer


def main(model: str, arguments: list[str]) -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    server_main.prepare_server()
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.model_loader.weight_utils import get_quant_config
    from sglang.srt.server_args import prepare_server_args

    settings = prepare_server_args(arguments)
    override = settings.json_model_override_args
    model_config = ModelConfig(
        model, model_override_args=override, quantization=settings.quantization, dtype="bfloat16"
    )
    config = get_quant_config(model_config, LoadConfig(), {})
    fp8._is_cpu = False  # on a CPU it would check for AMX
    root = torch.nn.Module()
    for name, then in (("plain", None), ("shuffling", shuffle), ("packing", pack)):
        method = fp8.Fp8LinearMethod(config)
        if then is not None:
            method.process_weights_after_loading = then
        root.add_module(name, make_layer(method, 300, 256))
    root.attn = torch.nn.Module()
    root.attn.quant_method = fp8.Fp8KVCacheMethod(config)
    root.attn.quant_method.create_weights(root.attn)
    root.attn.k_scale.fill_(3e-4)  # the value that a dummy load sets
    found = {name: [list(p.shape), str(p.dtype)] for name, p in root.plain.named_parameters()}
    problems = loader.check_formats(root)
    scales = [float(root.attn.k_scale), float(root.attn.v_scale), root.attn.k_scale_float, root.attn.v_scale_float]
    print(json.dumps({"config": fields_of(config), "parameters": found, "problems": problems, "cache": scales}))


def fields_of(config: Any) -> dict[str, Any]:
    names = ("weight_block_size", "activation_scheme", "is_checkpoint_fp8_serialized", "ignored_layers")
    return {"class": type(config).__name__} | {name: getattr(config, name) for name in names}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
