"""One class per `model_type` of the supported families, from SGLang's module with that name (deepseek_v3: in deepseek_v2)."""

from typing import Any

from sglang.srt.models import mixtral
from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.mistral import MistralForCausalLM
from sglang.srt.models.mixtral import MixtralForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from transformers import DeepseekV2Config, DeepseekV3Config

# SGLang reads these fields, but transformers leaves them out when it writes the config of such a model.
DeepseekV2Config.moe_layer_freq = DeepseekV3Config.moe_layer_freq = 1
DeepseekV2Config.scoring_func = "softmax"
DeepseekV3Config.scoring_func, DeepseekV3Config.topk_method = "sigmoid", "noaux_tc"


class NumberedMixtralMoE(mixtral.MixtralMoE):
    """Sets the layer number of its router. Without it SGLang records the experts of all layers in the same place."""

    def __init__(self, *args: Any, layer_id: int, **kwargs: Any) -> None:
        super().__init__(*args, layer_id=layer_id, **kwargs)
        self.topk.layer_id = layer_id


mixtral.MixtralMoE = NumberedMixtralMoE

EntryClass = [
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Glm4MoeForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
]
