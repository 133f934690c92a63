"""Digests of a run's start model, teachers and data. Checkpoints record them, so a resumed run detects changes.

The start model is also the reference of the KL penalty, so its files are hashed in full: config, tokenizer and, unless the run
starts from random weights, weights. Files of teachers are hashed in the same way. All ranks share the work in pieces. Each rank
hashes in a thread during the first step, and only a resumed run waits for it. Data is hashed as the prompts that were read.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from grpo_mega.config import Config
from grpo_mega.distributed.recorder import recorder
from grpo_mega.errors import ConfigError, ResumeError
from grpo_mega.formats.dcp_read import FORMAT, METADATA, is_distributed_checkpoint
from grpo_mega.formats.hf_files import weight_files

TEXT_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json"),
)
MEGATRON_FILES = (METADATA, FORMAT, "common.pt")
MODEL = "model/"  # prefix of the names of the model's files
PIECE = 256 << 20  # bytes; a larger file's digest is the sha256 of its pieces' digests
_CHUNK = 4 << 20
_SECONDS_BETWEEN_LOOKS = 0.2


class InputDigests(threading.Thread):
    """Digests of one run's inputs. `data` has the digests of its data by config key. All ranks call every method together.

    The thread hashes this rank's pieces of the model's files. `digests` starts it, if `start` was not called before.
    """

    def __init__(self, config: Config, data: Mapping[str, str], rank: int, world_size: int) -> None:
        super().__init__(name="model digests", daemon=True)
        self._folder, self._data = config.model.path, dict(data)
        files = {f"{MODEL}{path.name}": path for path in model_files(self._folder, has_weights=config.model.init != "random")}
        for name, teacher in config.teachers.items():
            files |= {f"teachers.{name}/{p.name}": p for p in model_files(teacher.path, has_weights=teacher.url is None)}
        pieces = [(name, path, i) for name, path in files.items() for i in range(max(1, -(-path.stat().st_size // PIECE)))]
        self._mine = pieces[rank::world_size]
        self._digests: dict[tuple[str, int], str] = {}  # digest of each piece, by file name and piece number
        self._num_done = 0  # number of hashed chunks
        self._problem = ""
        self._gathered: dict[str, str] | None = None

    def digests(self) -> dict[str, str]:
        """Wait until the model is hashed, and return the digests of model and data. Raise ConfigError for unreadable files."""
        if self._gathered is None:
            if self.ident is None:
                self.start()
            num_seen = 0
            while self.is_alive():
                self.join(_SECONDS_BETWEEN_LOOKS)
                if self._num_done > num_seen:
                    num_seen = self._num_done
                    recorder().beat()
            everyone: list[tuple[dict[tuple[str, int], str], str]] = [({}, "")] * dist.get_world_size()
            dist.all_gather_object(everyone, (self._digests, self._problem))
            for _, problem in everyone:
                if problem:
                    raise ConfigError(f"a file of model.path or of a teacher cannot be read ({problem}); fetch it again")
            by_file: dict[str, list[str]] = {}
            for (name, _), digest in sorted(item for digests, _ in everyone for item in digests.items()):
                by_file.setdefault(name, []).append(digest)
            self._gathered = {name: _joined(pieces) for name, pieces in by_file.items()} | self._data
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
                    f"model.path={self._folder}: must hold the model that the run started from, its reference, but {file} "
                    f"{change} since the checkpoint; put the run's files back, or start another run_dir"
                )
        return [
            f"{name} has changed since the run's checkpoint; the run continues with the current content" for name in changed
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


def _joined(pieces: list[str]) -> str:
    return pieces[0] if len(pieces) == 1 else hashlib.sha256("".join(pieces).encode()).hexdigest()
