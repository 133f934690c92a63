"""Read the Hugging Face checkpoint that a run starts from, and write the trained policy as a Hugging Face checkpoint.

Checkpoints of the run record digests of the start model, its teachers and data, so a resumed run detects changes. The
start model is also the reference of the KL penalty, so its files are hashed in full: config, tokenizer and, unless the
weights are random, weights. Files of teachers are hashed in the same way. All ranks share the work in pieces. Each rank
hashes in a thread during the first step, and only a resumed run waits for it. Data is hashed as the prompts that were
read.
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from grpo_mega.config import Config, ModelConfig
from grpo_mega.data.chat import find_end_token, find_turn_end
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.errors import ConfigError, ResumeError, WeightMappingError
from grpo_mega.formats import adapter
from grpo_mega.formats.adapter import MAX_SHARD_BYTES
from grpo_mega.formats.dcp_read import FORMAT, METADATA, is_distributed_checkpoint
from grpo_mega.formats.detect import Manifest
from grpo_mega.formats.hf_files import (
    check_vocabulary,
    extra_names,
    folder_tensors,
    generation_token_ids,
    index_of,
    may_have_extra,
    side_contents,
    split_into_shards,
    weight_files,
    with_old_fields,
)
from grpo_mega.formats.megatron_weights import MegatronWeights
from grpo_mega.formats.output import make_partial, publish_folder
from grpo_mega.formats.reader import CheckpointReader, joined, open_reader, random_reader
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron.offload import Teacher
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.precision import DTYPES
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.progress import phase
from grpo_mega.paths import read_json
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sglang.session import check_server
from grpo_mega.run.saving import gather
from grpo_mega.text import well_formed
from grpo_mega.weights.apply import execute
from grpo_mega.weights.architecture import shape_of
from grpo_mega.weights.boxes import Box, RankShards, whole
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import ShardLayout, hf_rank_shards
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import FLOAT32, Family, ModelShape, read_config

TEXT_FILES = """
    config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
    added_tokens.json vocab.json vocab.txt merges.txt tokenizer.model spiece.model tekken.json chat_template.jinja
    chat_template.json
    """.split()  # noqa: SIM905  # a list of texts is three times as long
GENERATION_CONFIG = "generation_config.json"
MEGATRON_FILES = (METADATA, FORMAT, "common.pt")
MODEL = "model/"  # prefix of the names of the model's files
PIECE = 256 << 20  # bytes; a larger file's digest is the sha256 of its pieces' digests
_CHUNK = 4 << 20
_SENTENCE = "What is 17 + 25?  Think first"  # to compare tokenizers; a space in front would be dropped by some
_SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class ModelFiles:
    """The Hugging Face checkpoint that a run starts from, and the values of its config."""

    folder: Path
    hf_config: Any
    shape: ModelShape
    family: Family
    dtype: torch.dtype  # model.dtype of the run's config

    def read_weights(self, load: Callable[[Callable[[Box], torch.Tensor]], None], folder: Path | None = None) -> None:
        """Call `load` with a function that reads the weights in `folder` (default: the model). Raise
        WeightMappingError.
        """
        with open_reader(folder or self.folder, self.family, self.shape) as reader:
            reader.check(self.family.hf_tensors(self.shape))
            load(reader.read)


def read_model_files(config: Config, teacher: Path | None = None) -> ModelFiles:
    """Read model.path, or a teacher's folder. Raise ConfigError or WeightMappingError if the model cannot be
    trained.
    """
    folder = teacher or config.model.path
    try:
        hf_config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers and its dependencies raise exceptions of any type
        raise ConfigError(
            f"transformers refuses {folder / 'config.json'} ({' '.join(str(error).split())}); correct the file"
        ) from None
    shape = shape_of(hf_config.to_dict())
    hf_config = hf_config.get_text_config()  # only the language model of a multimodal model trains
    return ModelFiles(folder, hf_config, shape, family_of(shape.model_type), DTYPES[config.model.resolved_dtype])


def read_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Load the tokenizer. Raise ConfigError if it cannot be loaded or is larger than the model's vocabulary."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise exceptions of any type
        raise ConfigError(
            f"the tokenizer of model.path={folder} cannot be loaded ({error!r}); fetch its files again"
        ) from None
    check_vocabulary(folder, max(tokenizer.get_vocab().values()), vocab_size)
    pieces = next((path for name in ("tokenizer.model", "spiece.model") if (path := folder / name).is_file()), None)
    if pieces is not None and not (folder / "tokenizer.json").is_file():
        wanted: list[int] = []
        with suppress(ImportError, OSError, RuntimeError):  # not installed, or a damaged file
            from sentencepiece import SentencePieceProcessor

            wanted = SentencePieceProcessor(model_file=str(pieces)).encode(_SENTENCE)
        if tokenizer(_SENTENCE, add_special_tokens=False)["input_ids"] != wanted:
            raise ConfigError(
                f"model.path={folder}: {type(tokenizer).__name__} may split text into other tokens than the model was"
                f" trained on, as SentencePiece with {pieces.name} does; copy the model's tokenizer.json there, or"
                " install sentencepiece and name the tokenizer_class in tokenizer_config.json"
            )
    return tokenizer


def decoder(tokenizer: Any, model: ModelFiles | None = None) -> Callable[[Sequence[int]], str]:
    """Return a function from a response's token ids to its text. Rewards, samples, reports and evaluation all use this
    text.

    The text leaves out only control tokens: the end-of-sequence, padding and start-of-sequence tokens of the tokenizer,
    the model and its generation config, and the end of a turn in the chat template. Other special tokens, such as
    <think> or <answer>, are text. A token that is only in rollout.stop_token_ids, such as </answer>, is also text,
    because a format may need it.
    """
    hidden = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id} - {None}
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {tokenizer.unk_token_id}
    turn_end = special.intersection(tokenizer(find_turn_end(tokenizer), add_special_tokens=False)["input_ids"])
    # Some tokenizers add line breaks.
    hidden |= {token for token in turn_end if tokenizer.convert_ids_to_tokens(token).strip()}
    if model is not None:
        # transformers' config defaults may name ordinary tokens, so padding and start tokens count only if they are
        # special.
        hidden |= _ids_of(model, "eos_token_id")
        hidden |= special & (_ids_of(model, "pad_token_id") | _ids_of(model, "bos_token_id"))

    def decode(token_ids: Sequence[int]) -> str:
        shown = [token for token in token_ids if token not in hidden]
        return well_formed(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def _ids_of(model: ModelFiles, name: str) -> set[int]:
    """Return the ids in a field such as eos_token_id of the model's config and its generation config."""
    value = getattr(model.hf_config, name, None)
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return generation_token_ids(model.folder, name) | set(ids)


def training_sampling(config: Config, model: ModelFiles, tokenizer: Any) -> Sampling:
    """Return the sampling parameters of training.

    Every end-of-sequence id of the config, the model, its generation config and the tokenizer stops a response.
    """
    stops = {*config.rollout.stop_token_ids, *_ids_of(model, "eos_token_id"), tokenizer.eos_token_id} - {None}
    return Sampling(
        group_size=config.algorithm.group_size,
        temperature=config.rollout.temperature,
        max_response_length=config.rollout.max_response_length,
        stop_token_ids=frozenset(stops),
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        seed=config.seed,
        vocab_size=model.shape.vocab,
        with_routes=bool(config.rollout.routing_replay),
        longest_first=config.rollout.longest_first,
    )


def with_end_token(config: Config, model: ModelFiles) -> dict[str, bytes]:
    """Return the model's file of eos ids, by its name, with the token that ends a turn, which sft trains.

    Return {} if the model's files name the token, or if no token ends a turn.
    """
    tokenizer, ids = read_tokenizer(model.folder, model.shape.vocab), _ids_of(model, "eos_token_id")
    token, _ = find_end_token(tokenizer, training_sampling(config, model, tokenizer).stop_token_ids)
    if token is None or token in ids:
        return {}
    name = GENERATION_CONFIG if (model.folder / GENERATION_CONFIG).exists() else "config.json"
    values = with_old_fields(read_json(model.folder / name), config.model.resolved_dtype)
    values |= {"eos_token_id": [*sorted(ids), token]}
    return {name: json.dumps(values, indent=2).encode() + b"\n"}


def build_policy(config: Config, model: ModelFiles, runtime: Runtime) -> Policy:
    """Build the policy and its teachers. The policy gets the checkpoint's weights, or random weights from the seed."""
    policy = Policy(config, model.shape, model.family, model.hf_config, runtime)
    load = partial(policy.load, read_adapter=adapter.read(config.model.adapter) if config.model.adapter else None)
    _read_start(config, model, load)
    for name, settings in config.teachers.items():
        if settings.url is None:
            theirs = read_model_files(config, settings.path)
            with phase(f"loading the teacher {name}", runtime.rank == 0 and config.log.progress):
                teacher = Teacher(config, theirs.shape, theirs.family, theirs.hf_config, runtime, model.shape.vocab)
                theirs.read_weights(teacher.load)
            policy.teachers[name] = teacher
        else:
            with runtime.raise_on_all_ranks():
                check_server(name, settings.url)
    return policy


def _read_start(config: Config, model: ModelFiles, load: Callable[[Callable[[Box], torch.Tensor]], None]) -> None:
    """Load the weights that a run starts from: the model's, or random ones from the seed."""
    if config.model.init == "random":
        load(random_reader(model.family.hf_tensors(model.shape), config.seed, model.hf_config.initializer_range))
    else:
        model.read_weights(load)


def load_saved(config: Config, policy: Policy, model: ModelFiles, folder: Path) -> None:
    """Fill the weights from `folder`, a model or a checkpoint's state. With model.lora such a state is an adapter."""
    if not policy.lora.parameters or not is_distributed_checkpoint(folder) or folder == model.folder:
        model.read_weights(policy.load_weights, folder)
        return
    with CheckpointReader(MegatronWeights(folder, policy.lora.family, model.shape)) as saved:
        _read_start(config, model, partial(policy.load_weights, read_adapter=saved.read))


def check_base(config: Config, manifest: Manifest, rank: int, world_size: int) -> None:
    """Raise ResumeError if model.path is not the base of a checkpoint's adapter. All ranks call it."""
    InputDigests(config.model_copy(update={"teachers": {}}), {}, rank, world_size).changes(manifest.inputs)


def export_adapter(policy: Policy, model: ModelFiles, config: ModelConfig, folder: Path) -> None:
    """Write the policy's adapter as a PEFT folder on rank 0, replacing it. All ranks call it."""
    assert config.lora is not None
    optimizers.wait_for_param_gather(policy.chunks)
    family = policy.lora.family
    shards, wanted = policy.lora.shards, hf_rank_shards(family, model.shape)
    sources = ShardLayout.of_ranks([shards.rank_shards(rank) for rank in range(shards.world_size)])
    gathered = gather_on_first(sources, policy.lora.parameters, wanted, model.dtype)
    if gathered:
        adapter.write(folder, gathered, config.lora, family, model.folder)
    dist.barrier()


def gather_on_first(
    sources: ShardLayout, tensors: Mapping[str, torch.Tensor], wanted: RankShards, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the `wanted` tensors on rank 0, in `dtype` or the fixed dtype of their name; {} on the other ranks."""
    is_first, world_size = dist.get_rank() == 0, sources.world_size
    targets = ShardLayout.of_ranks([wanted if rank == 0 else {} for rank in range(world_size)])
    plan = plan_transfers(sources, targets, ranks_per_node=world_size)
    device = next(iter(tensors.values())).device
    gathered = {
        name: torch.empty(local.shape, dtype=torch.float32 if name.endswith(FLOAT32) else dtype, device=device)
        for name, local in (wanted.items() if is_first else ())
    }
    execute(plan, tensors, gathered, dtype=dtype)
    return gathered


def export_policy(
    policy: Policy,
    model: ModelFiles,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    record: Mapping[str, bytes | Path] = MappingProxyType({}),
    *,
    shows_progress: bool = False,
) -> None:
    """Write the policy as a Hugging Face folder on rank 0, replacing it. All ranks call it.

    `record`: further files of the folder by name, such as the step of the policy.

    Rank 0 gathers and writes one shard at a time. The folder appears only when it is complete. Config and tokenizer are
    copied byte for byte from the start model (except as in `side_contents`), because libraries rewrite fields when they
    save a config.
    """
    is_writer = dist.get_rank() == 0
    family, shape, tensors, world_size = model.family, model.shape, policy.tensors(), policy.shards.world_size
    sources = ShardLayout.of_ranks([policy.shards.rank_shards(rank) for rank in range(world_size)])
    reader: CheckpointReader | None = None  # for parts that the policy leaves out
    with suppress(WeightMappingError):  # the start model has no weights
        if may_have_extra(read_config(model.folder)):
            reader = open_reader(model.folder, family, shape)
    extra = {name: reader.num_bytes(name) for name in extra_names(reader.names)} if reader else {}
    stored = folder_tensors(family.hf_tensors(shape), stacks_experts=family.stacks_experts)
    dtypes = {name: torch.float32 if name.endswith(FLOAT32) else model.dtype for name in stored}
    num_bytes = {name: prod(size) * dtypes[name].itemsize for name, (size, _) in stored.items()} | extra
    shards = split_into_shards(num_bytes, max_shard_bytes)
    partial = make_partial(folder) if is_writer else None
    with phase("writing the policy", shows_progress and is_writer, sum(num_bytes.values()), "bytes") as bar:
        for file, names in shards.items():
            own = {name: stored[name] for name in names if name not in extra}
            wanted = hf_rank_shards(family, shape, (part for _, parts in own.values() for part in parts))
            gathered = gather_on_first(sources, tensors, wanted, model.dtype)
            if partial:
                kept = {
                    name: reader.read(whole(name, reader.shape(name))) for name in names if reader and name in extra
                }
                written = joined(gathered, own) | kept
                content = {name: tensor.cpu().contiguous() for name, tensor in written.items()}
                save_file(content, partial / file, metadata={"format": "pt"})
            bar.advance(sum(num_bytes[name] for name in names))
    if partial:
        shutil.rmtree(folder, ignore_errors=True)
        side = side_contents(model.folder, str(model.dtype).removeprefix("torch."))
        publish_folder(partial, folder, side | index_of(shards, num_bytes) | dict(record))
    dist.barrier()


class InputDigests(threading.Thread):
    """Digests of one run's inputs. `data` has the digests of its data by config key. All ranks call every method
    together.

    The thread hashes this rank's pieces of the model's files. `digests` starts it, if `start` was not called before.
    """

    def __init__(self, config: Config, data: Mapping[str, str], rank: int, world_size: int) -> None:
        super().__init__(name="model digests", daemon=True)
        self._folder, self._data = config.model.path, dict(data)
        if config.model.lora is not None and config.model.init == "random":  # the seed decides the base
            self._data[f"{MODEL}random weights"] = f"seed {config.seed}"
        files = {
            f"{MODEL}{path.name}": path for path in model_files(self._folder, has_weights=config.model.init != "random")
        }
        for name, teacher in config.teachers.items():
            files |= {
                f"teachers.{name}/{p.name}": p for p in model_files(teacher.path, has_weights=teacher.url is None)
            }
        pieces = [
            (name, path, i) for name, path in files.items() for i in range(max(1, -(-path.stat().st_size // PIECE)))
        ]
        self._mine = pieces[rank::world_size]
        self._shows_progress = rank == 0 and config.log.progress
        self._digests: dict[tuple[str, int], str] = {}  # digest of each piece, by file name and piece number
        self._num_done = 0  # number of hashed chunks
        self._problem = ""
        self._gathered: dict[str, str] | None = None

    def digests(self) -> dict[str, str]:
        """Wait until the model is hashed, and return the digests of model and data. Raise ConfigError for unreadable
        files.
        """
        if self._gathered is None:
            if self.ident is None:
                self.start()
            num_seen = 0
            total = sum(min(PIECE, path.stat().st_size - i * PIECE) for _, path, i in self._mine)
            with phase("hashing the start model", self._shows_progress, total, "bytes") as bar:
                while self.is_alive():
                    self.join(_SECONDS_BETWEEN_LOOKS)
                    if (num_done := self._num_done) > num_seen:
                        bar.advance(_CHUNK * (num_done - num_seen))
                        num_seen = num_done
                        recorder().beat()
            everyone = gather((self._digests, self._problem))
            for _, problem in everyone:
                if problem:
                    raise ConfigError(
                        f"a file of model.path or of a teacher cannot be read ({problem}); fetch it again"
                    )
            by_file: dict[str, list[str]] = {}
            for (name, _), digest in sorted(item for digests, _ in everyone for item in digests.items()):
                by_file.setdefault(name, []).append(digest)
            joined = {
                name: pieces[0] if len(pieces) == 1 else hashlib.sha256("".join(pieces).encode()).hexdigest()
                for name, pieces in by_file.items()
            }
            self._gathered = joined | self._data
        return self._gathered

    def changes(self, recorded: Mapping[str, str]) -> list[str]:
        """Return a line for each data set or teacher's file that differs from `recorded`.

        Raise ResumeError if the model has changed.
        """
        now = self.digests()
        changed = [name for name in sorted(recorded.keys() | now.keys()) if recorded.get(name) != now.get(name)]
        for name in changed:
            if name.startswith(MODEL):
                file = name.removeprefix(MODEL)
                change = "is gone" if name not in now else "is new" if name not in recorded else "differs"
                raise ResumeError(
                    f"model.path={self._folder}: must hold the model that the run started from, its reference, but"
                    f" {file} {change} since the checkpoint; put the run's files back, or start another run_dir"
                )
        return [
            f"{name} has changed since the run's checkpoint; the run continues with the current content"
            for name in changed
        ]

    def run(self) -> None:
        try:
            for name, path, index in self._mine:
                digest, left = hashlib.sha256(), PIECE
                with path.open("rb") as file:
                    file.seek(index * PIECE)
                    while chunk := file.read(min(_CHUNK, left)):
                        digest.update(chunk)
                        left -= len(chunk)
                        self._num_done += 1
                self._digests[name, index] = digest.hexdigest()
        except BaseException as error:  # a digest without this piece must not be recorded
            self._problem = str(error) or repr(error)


def model_files(folder: Path, *, has_weights: bool) -> list[Path]:
    """Return the files of a model that a run depends on."""
    texts = [path for name in TEXT_FILES if (path := folder / name).is_file()]
    if not has_weights:
        return texts
    if not is_distributed_checkpoint(folder):
        return texts + weight_files(folder)
    return texts + [p for p in sorted(folder.iterdir()) if p.name in MEGATRON_FILES or p.suffix == ".distcp"]
