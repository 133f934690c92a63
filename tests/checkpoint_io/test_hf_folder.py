"""Checkpoint folders: slices are read without the rest, shards are written completely or not at all, errors name the
remedy.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mega.checkpoint_io.hf_files import INDEX, SINGLE, read_headers, split_into_shards, weight_files
from grpo_mega.checkpoint_io.hf_weights import HfWeights, check_tied
from grpo_mega.checkpoint_io.reader import open_hf_reader
from grpo_mega.errors import WeightMappingError
from grpo_mega.trainer import export
from grpo_mega.weights.boxes import Box, region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape, read_config
from tests.checkpoint_io.families import tensors_of
from tests.helpers.exports import export_alone
from tests.helpers.models import make_model, save_checkpoint

Checkpoint = tuple[Path, dict[str, Tensor]]


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    shape = ModelShape.from_hf_config(read_config(folder))
    return family_of(shape.model_type).hf_tensors(shape)


@pytest.fixture(params=["single", "sharded"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    model = make_model("qwen2", tied=True)
    size = {"single": "5GB", "sharded": "40KB"}[request.param]
    folder = save_checkpoint(model, tmp_path / "model", max_shard_size=size)
    assert (folder / INDEX).exists() == (request.param == "sharded")
    return folder, dict(model.named_parameters())


def test_slices_of_a_folder_equal_slices_of_the_model(checkpoint: Checkpoint) -> None:
    folder, parameters = checkpoint
    with open_hf_reader(folder) as reader:
        reader.check(shapes_of(folder))
        assert reader.names == set(parameters)
        for name, parameter in parameters.items():
            assert reader.shape(name) == tuple(parameter.shape)
            start = tuple(n // 3 for n in parameter.shape)
            box = Box(name, start, tuple(max(a + 1, n - 1) for a, n in zip(start, parameter.shape, strict=True)))
            assert torch.equal(reader.read(box), parameter[region(box.start, box.shape)])


def test_a_slice_keeps_the_files_dtype(tmp_path: Path) -> None:
    save_file({"t": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)}, tmp_path / SINGLE)
    with open_hf_reader(tmp_path) as reader:
        read = reader.read(Box("t", (1, 0), (2, 2)))
    assert (read.dtype, read.tolist()) == (torch.bfloat16, [[3.0, 4.0]])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss counts KiB only on Linux")
def test_reading_a_slice_of_a_large_tensor_takes_the_memory_of_the_slice(tmp_path: Path) -> None:
    """The file is a sparse file of 1 GiB. If the reader touched all of it, peak resident memory would show it.

    Rows are few and wide because the kernel maps up to 2 MiB around each byte that is read.
    """
    rows, columns = 16, 1 << 24
    size = rows * columns * 4
    header = json.dumps({"t": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open_hf_reader(tmp_path) as reader:
        for box in (
            Box("t", (7, 0), (8, columns // 8)),
            Box("t", (0, 999), (rows, 1011)),
        ):  # 8 MiB of a row; a few columns
            assert not reader.read(box).clone().any()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
    assert grown < 256 << 10, f"{grown >> 10} MiB"


def remove_shard(folder: Path) -> None:
    (folder / "model-00002-of-00006.safetensors").unlink()


def truncate_shard(folder: Path) -> None:
    path = folder / "model-00002-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def leave_a_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / "model-00002-of-00006.safetensors").write_text(text)


def empty_shard(folder: Path) -> None:
    (folder / "model-00002-of-00006.safetensors").write_bytes(b"")


def change_shard(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model-00002-of-00006.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def remove_tensor(folder: Path) -> None:
    change_shard(folder, lambda t: t.pop("model.layers.0.input_layernorm.weight"))


def add_tensor(folder: Path) -> None:
    change_shard(folder, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))


def change_vocabulary(folder: Path) -> None:
    config = read_config(folder)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 999}))


def cut_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {')


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def remove_weights(folder: Path) -> None:
    (folder / INDEX).unlink()


def add_whole_file(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00006.safetensors", folder / "model.safetensors")


def leave_the_index_of_another_model(folder: Path) -> None:
    for path in folder.glob("model-*.safetensors"):
        path.rename(folder / "model.safetensors")


BROKEN = {
    add_whole_file: (
        r"holds model.safetensors, which transformers reads, and model.safetensors.index.json, whose shards SGLang"
        r" reads; remove model.safetensors to use the shards, or remove model.safetensors.index.json and its shards$"
    ),
    leave_the_index_of_another_model: (
        r"fetch the missing shard, or remove model.safetensors.index.json if model.safetensors has the whole model$"
    ),
    remove_shard: (
        r"model-00002-of-00006.safetensors is named by .*index.json but does not exist; fetch the missing shard"
    ),
    truncate_shard: r"model-00002-of-00006.safetensors cannot be read \(.*\); fetch the file again",
    leave_a_pointer: r"model-00002-of-00006.safetensors cannot be read \(.*\); fetch the file again",
    empty_shard: r"model-00002-of-00006.safetensors cannot be read \(.*\); fetch the file again",
    remove_tensor: r"has no tensor 'model.layers.0.input_layernorm.weight'; fetch the checkpoint again",
    add_tensor: (
        r"holds 'model.layers.0.self_attn.q_norm.weight', unknown to its model type; check model_type in config.json"
    ),
    change_vocabulary: (
        r"embed_tokens.weight has shape \[102, 32\], but config.json means \[999, 32\]; give the config.json"
    ),
    cut_index: r"index.json is not an index of shards \(.*\); fetch the file again",
    empty_index: r"index.json is not an index of shards \(.*\); fetch the file again",
    remove_weights: r"has neither model.safetensors nor model.safetensors.index.json; give a checkpoint",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_refused_in_one_line_with_the_remedy(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = save_checkpoint(make_model("qwen2"), tmp_path / "model", max_shard_size="30KB")
    assert (folder / "model-00002-of-00006.safetensors").exists()
    damage(folder)
    with pytest.raises(WeightMappingError, match=BROKEN[damage]) as caught, open_hf_reader(folder) as reader:
        reader.check(shapes_of(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_index_that_names_only_the_whole_file_is_no_conflict(tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("qwen2"), tmp_path / "model")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")  # transformers reads no such file
    names = dict.fromkeys(shapes_of(folder), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    with open_hf_reader(folder) as reader:
        reader.check(shapes_of(folder))


def test_a_bin_beside_the_index_of_its_shards_is_refused(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "pytorch_model-1.bin"):
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "pytorch_model-1.bin"}}')
    with pytest.raises(WeightMappingError, match=r"remove pytorch_model\.bin"):
        HfWeights(tmp_path, {})


def test_a_stored_tied_output_layer_and_rotary_tables_are_accepted(tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("llama", tied=True), tmp_path / "model")
    tensors = load_file(folder / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / SINGLE)
    with open_hf_reader(folder) as reader:
        reader.check(shapes_of(folder))
    check_tied(folder, "lm_head.weight", "model.embed_tokens.weight", read_headers(weight_files(folder)))


def last_changed(values: Tensor) -> Tensor:
    values[-1, -1] += 1
    return values


@pytest.mark.parametrize("change", [last_changed, Tensor.bfloat16, lambda t: t[:-1]])
def test_an_output_layer_that_differs_from_a_tied_embedding_is_refused(
    change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """The layer differs in its last element, dtype or shape, and is in a separate shard."""
    folder = save_checkpoint(make_model("llama", tied=True), tmp_path / "model")
    tensors = load_file(folder / SINGLE)
    head = change(tensors["model.embed_tokens.weight"].clone())
    save_file({"lm_head.weight": head.contiguous()}, folder / "head.safetensors")
    (folder / SINGLE).rename(folder / "body.safetensors")
    places = dict.fromkeys(tensors, "body.safetensors") | {"lm_head.weight": "head.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(WeightMappingError, match=r"lm_head.weight .*model.embed_tokens.weight.*; .*false$"):
        check_tied(folder, "lm_head.weight", "model.embed_tokens.weight", read_headers(weight_files(folder)))


@pytest.mark.parametrize(
    ("text", "message"), [(None, "does not exist; give"), ("{", "is not JSON .*; restore the file")]
)
def test_a_config_that_cannot_be_read_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightMappingError, match=f"config.json {message}"):
        read_config(tmp_path)


def test_shards_keep_order_and_limit_and_a_larger_tensor_is_alone() -> None:
    num_bytes = {"a": 20, "b": 20, "c": 100, "d": 2, "e": 38}
    assert split_into_shards(num_bytes, 40) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }
    assert split_into_shards(num_bytes, 180) == {SINGLE: ["a", "b", "c", "d", "e"]}


@pytest.mark.parametrize("max_shard_bytes", [20_000, 5 << 30])
def test_a_written_folder_loads_in_transformers_with_its_side_files(tmp_path: Path, max_shard_bytes: int) -> None:
    model = make_model("qwen3", tied=True)
    source = save_checkpoint(model, tmp_path / "source")
    (source / "config.json").write_text(json.dumps(read_config(source) | {"unknown_to_libraries": [1, 2]}))
    parameters = dict(model.named_parameters())
    out = tmp_path / "out"
    parts = split_into_shards({name: parameters[name].nbytes for name in shapes_of(source)}, max_shard_bytes)
    export_alone(parameters, source, out, max_shard_bytes)

    side_files = {p.name for p in source.iterdir()} - {SINGLE}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= side_files
    numbered = {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))}
    weights = {SINGLE} if len(parts) == 1 else numbered | {INDEX}
    assert {p.name for p in out.iterdir()} == side_files | weights
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in side_files)
    assert (len(parts) > 3) == (max_shard_bytes == 20_000)
    assert all(path.stat().st_size < 22_000 for path in out.glob("model-*.safetensors"))

    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(out)("1+1")["input_ids"] == [22, 16, 22]
    with open_hf_reader(out) as reader:
        reader.check(shapes_of(out))
    assert not out.with_name("out.partial").exists()


def test_an_exported_config_has_the_rope_of_transformers_4_and_the_dtype(tmp_path: Path) -> None:
    model = make_model("glm4_moe", dtype=torch.bfloat16)
    source = save_checkpoint(model, tmp_path / "source")
    fields = read_config(source)
    for name in ("rope_theta", "partial_rotary_factor"):
        del fields[name]
    (source / "config.json").write_text(json.dumps(fields | {"dtype": "float16"}))
    tensors = dict(sorted(tensors_of(source).items()))  # the first is the bfloat16 output layer
    export_alone(tensors, source, tmp_path / "out")
    expected = fields | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "dtype": "bfloat16"}
    assert read_config(tmp_path / "out") == expected


def test_an_interrupted_export_keeps_the_old_folder_for_the_next_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen3", tied=True)
    source, out = save_checkpoint(model, tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    tensors, written = tensors_of(source), []

    def fail(tensors: dict[str, Tensor], path: Path, **more: Any) -> None:
        assert [p.name for p in out.iterdir()] == ["old"]
        written.append(path)
        save_file(tensors, path, **more)
        if len(written) == 2:
            raise OSError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is full"):
        patch.setattr(export, "save_file", fail)
        export_alone(tensors, source, out, max_shard_bytes=20_000)
    assert [p.name for p in out.iterdir()] == ["old"]
    assert {path.name for path in written} <= {p.name for p in out.with_name("out.partial").iterdir()}

    export_alone(tensors, source, out)
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}
    assert (out / SINGLE).read_bytes() == (source / SINGLE).read_bytes()
    assert not out.with_name("out.partial").exists()
