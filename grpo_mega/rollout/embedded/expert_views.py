"""The weights of a transformers model under the names of its checkpoints.

Only MoE models need this mapping. transformers stores all experts of a layer in one parameter, so each expert becomes a view of
it. It stores the bias of DeepSeek-V3's router in a float32 buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from grpo_mega.weights.spec import FLOAT32, Family, ModelShape


def checkpoint_tensors(model: nn.Module, family: Family, shape: ModelShape) -> Mapping[str, Tensor]:
    """Return the parameters of `model`, views of expert parameters, and router biases, by the names of `family.hf_tensors`."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        if name.endswith(FLOAT32):
            buffer.data = buffer.data.float()  # transformers also loads it in float32
            parameters[name] = buffer
    if not shape.num_experts:
        return parameters
    tensors: dict[str, Tensor] = {}
    for layer in dict(shape.spans(range(shape.num_layers)))["moe"]:
        tensors |= dict(_moe_layer(parameters, family, shape, layer))
    return tensors | parameters


def _moe_layer(parameters: dict[str, Tensor], family: Family, shape: ModelShape, layer: int) -> Iterator[tuple[str, Tensor]]:
    """Remove a layer's router and experts from `parameters` and yield them under their names in the family's table."""
    router, gate_up, down = (row.hf for row in family.rows if "router.weight" in row.megatron or row.where == "expert")
    block = f"model.layers.{layer}.mlp"
    yield router[0].format(i=layer), parameters.pop(f"{block}.gate.weight")
    gates_ups = parameters.pop(f"{block}.experts.gate_up_proj")  # [experts, 2 * moe_ffn, hidden]
    downs = parameters.pop(f"{block}.experts.down_proj")  # [experts, hidden, moe_ffn]
    for expert in range(shape.num_experts):
        for name, part in zip(gate_up, gates_ups[expert].chunk(2), strict=True):
            yield name.format(i=layer, e=expert), part
        yield down[0].format(i=layer, e=expert), downs[expert]
