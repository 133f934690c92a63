"""Read a run's inputs, and compare what all ranks of a start read, before they join process groups.

A rank compares its variables, its CUDA libraries, and its prompts as rendered. The first rank of each node also
compares the settings, the installed packages, the code, and the files that the settings name. Files are hashed in full
up to 64 MiB. Of a larger one 4 MiB are hashed: its start, with the header, and parts at equal distances.

If a value differs, or a rank cannot read its inputs, all ranks end with the same line, which names rank and node.

Checkpoints of the run record digests of the start model, its teachers and data, so a resumed run detects changes. The
start model is also the reference of the KL penalty, so its files are hashed in full: config, tokenizer and, unless the
weights are random, weights. Files of teachers are hashed in the same way. All ranks share the work in pieces. Each rank
hashes in a thread during the first step, and only a resumed run waits for it. Data is hashed as the prompts that were
read.
"""

import hashlib
import os
import re
import socket
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from glob import glob
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from grpo_mega import config as configs
from grpo_mega.checkpoint_io.checkpoints import Manifest
from grpo_mega.checkpoint_io.dcp_read import FORMAT, METADATA, is_distributed_checkpoint
from grpo_mega.checkpoint_io.hf_files import weight_files
from grpo_mega.checkpoint_io.model import ModelFiles, read_model_files, read_tokenizer
from grpo_mega.config import Config
from grpo_mega.data.chat import find_end_token, load_demonstrations, set_date
from grpo_mega.data.load import RunData, Sampler, load_data
from grpo_mega.distributed.environment import is_one_machine
from grpo_mega.distributed.libraries import read_libraries, read_variables
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.errors import ConfigError, EngineError, ResumeError, UserError
from grpo_mega.paths import CHECKPOINTS, LATEST
from grpo_mega.rollout.sessions.tool_schemas import tool_schemas
from grpo_mega.text import as_text
from grpo_mega.tracking.progress import phase
from grpo_mega.trainer.folder import FirstStart, first_start
from grpo_mega.trainer.saving import gather
from grpo_mega.user_code import is_user_name, source_files

TEXT_FILES = """
    config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
    added_tokens.json vocab.json vocab.txt merges.txt tokenizer.model spiece.model tekken.json chat_template.jinja
    chat_template.json
    """.split()  # noqa: SIM905  # a list of texts is three times as long
MEGATRON_FILES = (METADATA, FORMAT, "common.pt")
MODEL = "model/"  # prefix of the names of the model's files
PIECE = 256 << 20  # bytes; a larger file's digest is the sha256 of its pieces' digests
_CHUNK = 4 << 20
_SECONDS_BETWEEN_LOOKS = 0.2
_WORD = re.compile(r'[^\s",]*\w[^\s",]*')
_WHOLE = 64 << 20  # bytes; of a larger file, only parts are read
_PART, _NUM_PARTS = 256 << 10, 16

Inputs = dict[str, dict[str, str]]  # values and digests by name, of a rank and of its node; or an error


@dataclass
class SameInputs:
    """The inputs of one rank. `data` has the digests of its prompts."""

    config: Config
    wait: Callable[[], None] = lambda: None  # waits for what starts meanwhile
    data: dict[str, str] = field(default_factory=dict)
    error: UserError | None = None
    found: Any = None

    def meet(self, ranks: Rendezvous) -> None:
        """Read the inputs as `found`, on all ranks with the first start that rank 0 knows, and compare them."""
        start = None
        if ranks.rank == 0:
            with self.reading():
                start = first_start(self.config.run_dir)
        start = ranks.all_gather("the first start", start, self.config.collective_timeout_s)[0]
        if start is not None:
            shows = self.config.log.progress and not ranks.rank
            with self.reading(), phase("reading the tokenizer and the data", shows):
                self.found = read_inputs(self.config, FirstStart(*start))
                self.data = self.found[2].digests
                self.wait()
        self.compare(ranks)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep an error of the block for `compare`, so that the other ranks do not wait for this one."""
        try:
            yield
        except UserError as error:
            self.error = error

    def compare(self, ranks: Rendezvous) -> None:
        """Raise the same ConfigError on all ranks if two differ, or this rank's error if all have it."""
        gather_inputs = partial(ranks.all_gather, "comparing inputs", deadline_s=self.config.collective_timeout_s)
        inputs: Inputs = {"rank": read_variables() | self.data}
        with self.reading():
            inputs["rank"] |= read_libraries()
            if not is_one_machine(os.environ) and os.environ.get("LOCAL_RANK", "0") == "0":
                inputs["node"] = read_node(self.config)
        if self.error:
            inputs = {"rank": {"error": str(self.error)}}
        # Sorted, because each disk lists packages and files in another order.
        texts = {part: repr(sorted(inputs[part].items())) for part in inputs}
        digests = gather_inputs({part: hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()})
        if all(one.items() <= ChainMap(*digests).items() for one in digests):
            if self.error:
                raise self.error
            return
        problem = first_difference(gather_inputs([f"rank {ranks.rank} ({socket.gethostname()})", inputs]))
        with suppress(EngineError, DistError):  # rank 0 may hold the store, so it waits until all have read
            gather_inputs(None)
        raise ConfigError(*problem.split("\n"))


def read_inputs(config: Config, start: FirstStart) -> tuple[ModelFiles, Any, RunData, Sampler]:
    """Return the model's files, the tokenizer, the data, and the order of its prompts.

    `start` is the run's first start; its date is that in the prompts.
    """
    model = read_model_files(config.model)
    tokenizer = read_tokenizer(model.folder, model.shape.vocab)
    set_date(tokenizer, start.time)
    stop_ids = model.stop_ids(tokenizer, config.rollout.stop_token_ids)
    load = partial(load_demonstrations, stop_ids=stop_ids) if config.algorithm.is_sft else None
    data = load_data(config.data, tokenizer, load, tool_schemas(config.rollout, config.code_dir), start.split)
    if problem := find_end_token(tokenizer, stop_ids)[1]:
        data = replace(data, notes=(*data.notes, problem))
    return model, tokenizer, data, data.sampler(config.data, config.batch.prompts_per_step, config.seed, config.rollout)


def first_difference(everyone: Sequence[tuple[str, Inputs]]) -> str:
    """Return an error of a rank, or a line about the first value that differs, of the names and inputs of all ranks."""
    for name, inputs in everyone:
        if "error" in inputs["rank"]:
            return f"{name}: {inputs['rank']['error']}"
    differences = (
        f"{key}: must be the same on all ranks, but is {values.get(key, 'absent'):.200} on {name} and"
        f" {usual.get(key, 'absent'):.200} on {first}; give all nodes the same"
        for part in ("node", "rank")
        for first, usual in [next((name, inputs[part]) for name, inputs in everyone if part in inputs)]
        for name, inputs in everyone
        for values in [inputs.get(part, usual)]
        for key in usual | values
        if usual.get(key) != values.get(key)
    )
    return next(differences)


def read_node(config: Config) -> dict[str, str]:
    """Return settings, versions, and digests of files. Causes come before their effects."""
    # The config may be at another place on each node, an evaluation's run_dir is temporary, and steps may follow from
    # the data.
    unlike = {"code_dir", config.checkpoint.interval or "run_dir", config.data.epochs and "steps"}
    values = {key: as_text(value) for key, value in configs.changed(config).items() if key not in unlike}
    words = [
        word
        for key in values
        if not key.startswith(("data.", "log.", "run_dir"))
        for word in _WORD.findall(values[key])
    ]
    files = {name: Path(name) for word in words for name in [word, *sorted(glob(f"{word}/*"))] if os.path.isfile(name)}
    files |= source_files(["grpo_mega", *filter(is_user_name, words)], config.code_dir)
    files["the last checkpoint"] = config.run_dir / CHECKPOINTS / LATEST
    packages = sorted((str(found.name), str(found.version)) for found in distributions())
    values |= {f"package {name}": version for name, version in packages}
    return values | {"Python": sys.version} | {name: file_digest(path) for name, path in files.items()}


def file_digest(path: Path) -> str:
    """Return the size and a digest of a file, or why it cannot be read."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest = hashlib.sha256()
            for number in range(_NUM_PARTS if size > _WHOLE else 1):
                file.seek(size * number // _NUM_PARTS)
                digest.update(file.read(_PART if size > _WHOLE else _WHOLE))
    except OSError as error:
        return str(error.strerror)
    return f"{size} bytes, sha256 {digest.hexdigest()}"


def check_base(config: Config, manifest: Manifest, rank: int, world_size: int) -> None:
    """Raise ResumeError if model.path is not the base of a checkpoint's adapter. All ranks call it."""
    InputDigests(config.model_copy(update={"teachers": {}}), {}, rank, world_size).changes(manifest.inputs)


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
            f"{MODEL}{path.name}": path for path in input_files(self._folder, has_weights=config.model.init != "random")
        }
        for name, teacher in config.teachers.items():
            files |= {
                f"teachers.{name}/{p.name}": p for p in input_files(teacher.path, has_weights=teacher.url is None)
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
                        recorder().heartbeat()
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
        """Return a line for each dataset or teacher's file that differs from `recorded`.

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


def input_files(folder: Path, *, has_weights: bool) -> list[Path]:
    """Return the files of a model that a run depends on."""
    texts = [path for name in TEXT_FILES if (path := folder / name).is_file()]
    if not has_weights:
        return texts
    if not is_distributed_checkpoint(folder):
        return texts + weight_files(folder)
    return texts + [p for p in sorted(folder.iterdir()) if p.name in MEGATRON_FILES or p.suffix == ".distcp"]
