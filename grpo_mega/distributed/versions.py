"""The two sets of package versions that are tested together, and how the installed versions differ from them.

pip chooses the set by the Python version. A process has the set of its installed megatron-core. A free range per
package is not possible: SGLang pins torch and transformers exactly. Its kernels and its Rust radix tree load on a torch
that they were not built for, but then they misread tensors.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.requirements import Requirement

PACKAGES = ("grpo-mega", "torch", "megatron-core", "transformers", "transformer-engine", "sglang", "math-verify")
SETS = {
    "one": "megatron-core==0.16.1 torch==2.13.0 transformers==5.12.1 transformer-engine>=2.9,<2.12 sglang==0.5.21",
    "two": "megatron-core==0.19.2 torch==2.14.1 transformers==5.19.0 transformer-engine>=2.16.1,<2.21 sglang==0.5.23",
}


class VersionSet(NamedTuple):
    """The set of this process."""

    record: str  # name of the set, and the packages outside it, for run.json and checkpoints
    versions: dict[str, str]  # installed packages
    problems: list[str]  # the reason why the process is refused
    notes: list[str]  # lines for packages outside the set that GRPO_MEGA_UNTESTED_VERSIONS=1 allows

    def change(self, saved: str) -> list[str]:
        """Return a line if a checkpoint with the record `saved` has another set."""
        if saved == self.record:
            return []
        return [f"the checkpoint is from versions of set {saved}, and this is set {self.record}; rounding may differ"]


def installed_set() -> VersionSet:
    """Return the set of this process. The variable GRPO_MEGA_UNTESTED_VERSIONS=1 allows versions outside both sets."""
    versions = {name: version for name in PACKAGES if (version := installed_version(name))}
    name, unmet = find_set(versions)
    # 2.13.0+cpu and 2.13.0+cu130 are the same version.
    found = ", ".join(f"{package}={versions[package].partition('+')[0]}" for package in unmet)
    record = f"{name} with {found}" if unmet else name
    if unmet and os.environ.get("GRPO_MEGA_UNTESTED_VERSIONS") != "1":
        problem = (
            f"{found}: must be {', '.join(map(str, unmet.values()))} (set {name}), because SGLang's kernels and its"
            " Rust radix tree load on a torch that they were not built for and misread tensors; install these, or set"
            " GRPO_MEGA_UNTESTED_VERSIONS=1"
        )
        return VersionSet(record, versions, [problem], [])
    notes = [f"{one}={versions[one]}: is not tested; set {name} has {wanted}" for one, wanted in unmet.items()]
    return VersionSet(record, versions, [], notes)


def find_set(versions: dict[str, str]) -> tuple[str, dict[str, Requirement]]:
    """Return the set of this megatron-core, and its requirements that other packages do not meet.

    If no set has this megatron-core, return the set with the fewest such requirements. Missing packages meet all.
    """
    unmet = {
        name: {
            one.name: one
            for one in map(Requirement, text.split())
            if one.name in versions and not one.specifier.contains(versions[one.name], prereleases=False)
        }
        for name, text in SETS.items()
    }
    return min(unmet.items(), key=lambda item: ("megatron-core" in item[1], len(item[1])))


def installed_version(*packages: str) -> str | None:
    """Return the version of the first of these packages that is installed; None if none is."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    return None
