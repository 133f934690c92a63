"""Read the Hugging Face checkpoint that a run starts from: its config, weights and tokenizer."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from grpo_mega.checkpoint_io.hf_files import check_vocabulary, generation_token_ids
from grpo_mega.checkpoint_io.reader import open_reader
from grpo_mega.config import ModelConfig
from grpo_mega.data.chat import find_turn_end
from grpo_mega.errors import ConfigError
from grpo_mega.text import well_formed
from grpo_mega.weights.architecture import shape_of
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import Family, ModelShape

_SENTENCE = "What is 17 + 25?  Think first"  # to compare tokenizers; a space in front would be dropped by some


@dataclass(frozen=True)
class ModelFiles:
    """The Hugging Face checkpoint that a run starts from, and the values of its config."""

    folder: Path
    hf_config: Any
    shape: ModelShape
    family: Family
    dtype: torch.dtype  # model.dtype of the run's config

    def special_ids(self, name: str) -> set[int]:
        """Return the ids in a field such as eos_token_id of the model's config and its generation config."""
        value = getattr(self.hf_config, name, None)
        ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        return generation_token_ids(self.folder, name) | set(ids)

    def stop_ids(self, tokenizer: Any, others: Iterable[int]) -> frozenset[int]:
        """Return the tokens that stop a response: `others`, and every end-of-sequence id of the config, the model, its
        generation config and the tokenizer.
        """
        return frozenset({*others, *self.special_ids("eos_token_id"), tokenizer.eos_token_id} - {None})

    def read_weights(self, load: Callable[[Callable[[Box], torch.Tensor]], None], folder: Path | None = None) -> None:
        """Call `load` with a function that reads the weights in `folder` (default: the model). Raise
        WeightMappingError.
        """
        with open_reader(folder or self.folder, self.family, self.shape) as reader:
            reader.check(self.family.hf_tensors(self.shape))
            load(reader.read)


def read_model_files(model: ModelConfig) -> ModelFiles:
    """Read model.path. Raise ConfigError or WeightMappingError if the model cannot be trained."""
    folder = model.path
    try:
        hf_config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers and its dependencies raise exceptions of any type
        raise ConfigError(
            f"transformers refuses {folder / 'config.json'} ({' '.join(str(error).split())}); correct the file"
        ) from None
    shape = shape_of(hf_config.to_dict())
    hf_config = hf_config.get_text_config()  # only the language model of a multimodal model trains
    return ModelFiles(folder, hf_config, shape, family_of(shape.model_type), getattr(torch, model.resolved_dtype))


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
        hidden |= model.special_ids("eos_token_id")
        hidden |= special & (model.special_ids("pad_token_id") | model.special_ids("bos_token_id"))

    def decode(token_ids: Sequence[int]) -> str:
        shown = [token for token in token_ids if token not in hidden]
        return well_formed(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode
