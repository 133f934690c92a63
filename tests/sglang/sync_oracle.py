"""Log-probs by transformers with the weights that sync_worker.py exported; in a process where nothing is patched.

`python sync_oracle.py FOLDER` writes FOLDER/differences.json: by case and version, the largest difference of a rollout log-prob
from transformers' on the same weights, by the engine's tp, and on the weights of the version before. Where they travelled in
FP8 blocks the same weights are what naive blocks stand for; "exact" is the difference from those that were never quantised.
"""

import json
import sys
from pathlib import Path

import torch
from sync_cases import CASES, SAMPLING
from transformers import AutoModelForCausalLM

from tests.oracles import fp8_blocks as oracle


@torch.no_grad()
def difference(folder: Path, version: int, tp: int, weights_of: int, *, quantise: bool) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder / f"hf{weights_of}", dtype=torch.float32)
    for name, layer in model.named_modules():
        if quantise and isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.copy_(oracle.dequantise(*oracle.quantise(layer.weight), torch.float32))
    worst = 0.0
    for prompt, response, said in json.loads((folder / f"samples{version}_tp{tp}.json").read_text()):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(said)).abs().max()))
    return worst


def main(folder: Path) -> None:
    chosen = {name: CASES[name] for name in json.loads((folder / "cases.json").read_text())}
    found = {
        name: [
            {
                "same": {tp: difference(folder / name, version, tp, version, quantise=case.quantise) for tp in case.engine_tps},
                "before": difference(folder / name, version, case.engine_tps[0], version - 1, quantise=case.quantise),
                "exact": difference(folder / name, version, case.engine_tps[0], version, quantise=False),
            }
            for version in range(1, len(case.layouts) + 1)
        ]
        for name, case in chosen.items()
    }
    (folder / "differences.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
