"""`grpo-mega inspect PATH`: describe a Hugging Face folder, a converted checkpoint, or a run's folder or checkpoint.

It reads only headers, and imports no torch.
"""

from __future__ import annotations

import json
from typing import Any

from grpo_mega.commands.options import InspectOptions


def run(options: InspectOptions) -> int:
    """Print the description. Raise WeightMappingError if PATH is no checkpoint, or damaged."""
    from grpo_mega.formats.detect import describe

    description = describe(options.path, options.config)
    if options.is_json:
        print(json.dumps(description))
        return 0
    for name, value in description.items():
        if value is not None:
            print(f"{name.replace('_', ' '):<16} {formatted(name, value)}")
    return 0


def formatted(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value} ({value / 1e9:.2f} GB)"
    if name == "parameters":
        return f"{value} ({value / 1e9:.3f} billion)"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
