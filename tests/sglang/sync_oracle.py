"""Compare rollout log-probs with transformers on the weights that sync_worker.py exported, in a process without
patches.

`python sync_oracle.py FOLDER` writes FOLDER/differences.json. Per case and version, "same" is the largest difference of
a rollout log-prob from transformers on the same weights, keyed by the engine's tp. For weights sent as FP8 blocks
transformers gets naively dequantized blocks, and "exact" compares with the unquantized weights. "before" compares with
the weights of the previous version. "continued" compares samples that continued after an update, each span on the
weights of its version. "routes" is the fraction of tokens whose experts equal the choice of transformers' routers in
all layers; null for models without experts.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.oracles import fp8_blocks as oracle
from tests.sglang.sync_cases import CASES, SAMPLING


def rows_of(folder: Path, version: int, tp: int) -> list[Any]:
    rows: list[Any] = json.loads((folder / f"samples{version}_tp{tp}.json").read_text())
    return rows


@torch.no_grad()
def difference(folder: Path, rows: list[Any], weights_of: int, *, quantise: bool, version: int | None = None) -> float:
    """Return the largest log-prob difference on these weights, over all tokens or over the spans of one version."""
    model = AutoModelForCausalLM.from_pretrained(folder / f"hf{weights_of}", dtype=torch.float32)
    for name, layer in model.named_modules():
        if quantise and isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.copy_(oracle.dequantise(*oracle.quantise(layer.weight), torch.float32))
    worst = 0.0
    for prompt, response, said, spans, _ in rows:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        apart = (expected - torch.tensor(said)).abs()
        chosen = [apart[start:end] for made_by, start, end in spans if version in (None, made_by)]
        worst = max([worst, *(float(part.max()) for part in chosen)])
    return worst


@torch.no_grad()
def same_routes(folder: Path, rows: list[Any], version: int) -> float | None:
    """Return the fraction of tokens that the server sent to the same experts as transformers with these weights."""
    model = AutoModelForCausalLM.from_pretrained(folder / f"hf{version}", dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1]))
    num_same = num_tokens = 0
    for prompt, response, _, _, told in rows:
        chosen.clear()
        model(torch.tensor([prompt + response]))
        if not chosen:
            return None
        expected = torch.stack(chosen, dim=1)[:-1].sort(dim=2)[0]
        is_same = (torch.tensor(told).sort(dim=2)[0] == expected).flatten(1).all(dim=1)
        num_same, num_tokens = num_same + int(is_same.sum()), num_tokens + len(is_same)
    return num_same / num_tokens


def of_one(rows: list[Any], version: int) -> list[Any]:
    """Return the samples whose spans all have this version."""
    return [row for row in rows if {span[0] for span in row[3]} == {version}]


def continued(folder: Path, version: int, tp: int, *, quantise: bool) -> float | None:
    """Return the largest difference in samples that continued after an update, each span on the weights of its
    version.
    """
    rows = [row for row in rows_of(folder, version, tp) if row[3][0][0] != version]
    versions = sorted({span[0] for row in rows for span in row[3]})
    assert not rows or versions == [version - 1, version], versions
    return max((difference(folder, rows, v, quantise=quantise, version=v) for v in versions), default=None)


def main(folder: Path) -> None:
    chosen = {name: CASES[name] for name in json.loads((folder / "cases.json").read_text())}
    found = {
        name: [
            {
                "same": {
                    tp: difference(folder / name, rows, version, quantise=case.quantise) for tp, rows in by_tp.items()
                },
                "before": difference(folder / name, first, version - 1, quantise=case.quantise),
                "exact": difference(folder / name, first, version, quantise=False),
                "routes": same_routes(folder / name, first, version),
                "continued": {
                    tp: continued(folder / name, version, tp, quantise=case.quantise) for tp in case.engine_tps
                },
            }
            for version in range(1, len(case.layouts) + 1)
            for by_tp in [{tp: of_one(rows_of(folder / name, version, tp), version) for tp in case.engine_tps}]
            for first in [by_tp[case.engine_tps[0]]]
        ]
        for name, case in chosen.items()
    }
    (folder / "differences.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
