"""What training in FP8 asks of the machine and of the layout, known before anything is started; never imports torch.

Four recipes of Transformer Engine, by how they scale to the range of FP8: `delayed` by a history of maxima, `tensorwise` by
each tensor's own, `blockwise` in blocks of 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3), `mxfp8` in blocks of 32 (OCP MX).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from grpo_mega.config import LayoutConfig, PrecisionConfig
from grpo_mega.errors import ConfigError
from grpo_mega.weights.spec import ModelShape

Version = tuple[int, ...]
BLOCK = 128  # rows and columns of a weight that share a scale, with recipe blockwise


@dataclass(frozen=True)
class Needs:
    transformer_engine: Version  # since when it has the recipe
    capability: Version  # the least of a GPU's compute capability
    card: str
    length_multiple: int  # of the tokens in a micro-batch, by tensor-parallel rank


RECIPES = {
    "delayed": Needs((1, 0), (8, 9), "an L40, H100, H200 or later", 16),
    "tensorwise": Needs((2, 2), (8, 9), "an L40, H100, H200 or later", 16),
    "blockwise": Needs((2, 3), (9, 0), "an H100, H200 or later", 16),
    "mxfp8": Needs((2, 1), (10, 0), "a B200 or later", 32),
}


def transformer_engine_version() -> str | None:
    """The installed one's; None without one."""
    for package in ("transformer-engine", "transformer_engine"):
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    return None


def check_transformer_engine(precision: PrecisionConfig, found: str | None) -> None:
    """Raises ConfigError where Transformer Engine is missing, which Megatron would ignore silently, or too old."""
    if precision.fp8 is None:
        return
    if found is None:
        raise ConfigError(f"precision.fp8={precision.fp8!r} needs Transformer Engine; install it or leave precision.fp8 out")
    needed = RECIPES[precision.fp8_recipe].transformer_engine
    if _numbers(found) < needed:
        raise ConfigError(
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs Transformer Engine {'.'.join(map(str, needed))}, "
            f"found {found}; "
            f"install a newer one, or use {_those(lambda needs: needs.transformer_engine <= _numbers(found))}"
        )


def check_card(precision: PrecisionConfig, capability: Version | None, name: str) -> None:
    """Raises ConfigError for a device, called `name`, that cannot compute the recipe; `capability` is None on a CPU."""
    if precision.fp8 is None:
        return
    if capability is None:
        raise ConfigError(f"precision.fp8={precision.fp8!r} needs a GPU, and this run is on a CPU; leave precision.fp8 out")
    needs = RECIPES[precision.fp8_recipe]
    if capability < needs.capability:
        possible = _those(lambda other: other.capability <= capability)
        raise ConfigError(
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs {needs.card}, found {name}; "
            + (f"use {possible}" if possible else "leave precision.fp8 out")
        )


def check_blocks(precision: PrecisionConfig, layout: LayoutConfig, shape: ModelShape) -> None:
    """Raises ConfigError where blocks of 128 would straddle tensor-parallel ranks."""
    if precision.fp8 is None or precision.fp8_recipe != "blockwise":
        return
    for size, what in _cut_sizes(shape):
        if size % (BLOCK * layout.tp):
            blocks = f"{size} / {BLOCK} = {size // BLOCK} blocks" if size % BLOCK == 0 else f"no whole blocks of {BLOCK}"
            legal = [tp for tp in (1, 2, 4, 8) if all(s % (BLOCK * tp) == 0 for s, _ in _cut_sizes(shape))]
            remedy = f"layout.tp={' or '.join(map(str, legal))}, or " if legal else ""
            raise ConfigError(
                f"layout.tp={layout.tp} cuts the {size} {what} ({blocks}) amid a block of precision.fp8_recipe='blockwise'; "
                f"use {remedy}another recipe, such as tensorwise"
            )


def _cut_sizes(shape: ModelShape) -> Iterator[tuple[int, str]]:
    yield shape.q, "rows of the queries"
    yield shape.kv, "rows of the keys"
    yield (shape.moe_ffn, "rows of an expert") if shape.num_experts else (shape.ffn, "rows of the MLP")


def _those(holds: Callable[[Needs], bool]) -> str:
    return " or ".join(name for name, needs in RECIPES.items() if holds(needs))


def _numbers(text: str) -> Version:
    parts = []
    for part in text.split("+")[0].split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)
