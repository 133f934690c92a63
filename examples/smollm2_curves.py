"""Draw the curves of runs of smollm2.sh in one picture: `python examples/smollm2_curves.py PICTURE.png RUN_DIR ...`.
It needs `pip install matplotlib`.

The left panel has the strict held-out accuracy. The right panel has the mean reward of the samples in each update,
without the groups of equal rewards that dynamic sampling replaced. Each run is a line.
"""

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from grpo_mega import config as configs
from grpo_mega.paths import CONFIG_FILE, METRICS_FILE, user_path
from grpo_mega.text import filter_output
from grpo_mega.tracking.curves import read_curves

WEIGHTS = {"package": "dequantized from 4 bit", "hub": "original weights"}
PANELS = {
    "strict held-out accuracy": "eval/word_sums_oracle.py:word_sums_oracle",
    "accuracy of the samples in the update": "reward/accuracy",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the curves of runs of smollm2.sh.")
    parser.add_argument("picture", type=user_path)
    parser.add_argument("run_dirs", type=user_path, nargs="+", metavar="RUN_DIR")
    options = parser.parse_args()
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 3.8), layout="constrained", sharey=True)
    sources = set()
    for run_dir in options.run_dirs:
        config, curves = configs.load(run_dir / CONFIG_FILE), read_curves(run_dir / METRICS_FILE)
        sources.add(WEIGHTS.get(config.model.path.resolve().name, config.model.path.name))
        for panel, name in zip(axes, PANELS.values(), strict=True):
            steps = sorted(curves[name])
            label = f"{config.rollout.engine}, seed {config.seed}"
            panel.plot(steps, [curves[name][step] for step in steps], marker="o", markersize=3, label=label)
    for panel, title in zip(axes, PANELS, strict=True):
        panel.set(title=title, xlabel="step", ylim=(0, 1))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="lower right")
    figure.suptitle(
        f"SmolLM2-135M-Instruct on word sums ({', '.join(sorted(sources))}), 2 CPU cores", fontweight="bold"
    )
    figure.savefig(options.picture, dpi=150)
    print(options.picture)


if __name__ == "__main__":
    filter_output()
    main()
