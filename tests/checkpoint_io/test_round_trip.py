"""Hugging Face -> Megatron -> Hugging Face is the identity for every family and file format."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore, convert_mcore_to_hf, frame_of
from grpo_mega.checkpoint_io.dcp_read import FoundTensor, find_tensor
from grpo_mega.checkpoint_io.detect import find_checkpoint
from tests.checkpoint_io.families import CASES, assert_same_folder, edit_config, save, tensors_of

QUIET = {"show_progress": False}


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_returns_every_bit(name: str, tmp_path: Path) -> None:
    source = save(CASES[name], tmp_path / "hf", max_shard_size="40KB")
    report = convert_hf_to_mcore(source, tmp_path / "megatron", **QUIET)
    assert report.num_bytes == sum(t.nbytes for t in tensors_of(source).values())
    assert not report.nonfinite
    convert_mcore_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=40_000, workers=3, **QUIET)
    assert_same_folder(tmp_path / "back", source)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1
    assert not list(tmp_path.glob("*.partial"))


def test_experts_in_single_tensors_are_stacked_as_in_the_hubs_folders(tmp_path: Path) -> None:
    name = "qwen3_5_moe"
    stacked, source = (
        save(CASES[name], tmp_path / "hub"),
        save(replace(CASES[name], stacks_experts=False), tmp_path / "hf"),
    )
    assert any(".experts.4.up_proj.weight" in name for name in tensors_of(source))
    convert_hf_to_mcore(source, tmp_path / "megatron", **QUIET)
    convert_mcore_to_hf(tmp_path / "megatron", tmp_path / "back", **QUIET)
    found, expected = tensors_of(tmp_path / "back"), tensors_of(stacked)
    mtp = {key for key in expected if key.startswith("mtp.")}  # random in each folder
    assert found.keys() == expected.keys() and len(mtp) == 3
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items() if key not in mtp)


def test_written_shards_load_in_transformers(tmp_path: Path) -> None:
    source = save(CASES["llama3"], tmp_path / "hf")
    convert_hf_to_mcore(source, tmp_path / "megatron", **QUIET)
    convert_mcore_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=9_000, **QUIET)
    assert all(path.stat().st_size < 11_000 for path in (tmp_path / "back").glob("*.safetensors"))
    ours, theirs = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (tmp_path / "back", source))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_pytorch_model_bin_converts_like_safetensors(tmp_path: Path) -> None:
    source = save(CASES["llama1"], tmp_path / "hf")
    tensors = tensors_of(source)
    other = save(CASES["llama1"], tmp_path / "bin")
    (other / "model.safetensors").unlink()
    names = list(tensors)
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # old checkpoints store such tables
    shards = {"pytorch_model-00001.bin": names[:20], "pytorch_model-00002.bin": names[20:]}
    for file, part in shards.items():
        torch.save({n: tensors[n] for n in part} | tables, other / file)
    weight_map = {n: file for file, part in shards.items() for n in part}
    (other / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert_hf_to_mcore(other, tmp_path / "megatron", **QUIET)
    convert_mcore_to_hf(tmp_path / "megatron", tmp_path / "back", **QUIET)
    assert_same_folder(tmp_path / "back", source)


def test_each_tensor_keeps_its_dtype_unless_one_is_requested(tmp_path: Path) -> None:
    source = save(CASES["qwen2"], tmp_path / "hf")
    tensors = tensors_of(source)
    mixed = {n: t.float() if n.endswith("norm.weight") else t for n, t in tensors.items()}
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    convert_hf_to_mcore(source, tmp_path / "megatron", **QUIET)
    convert_mcore_to_hf(tmp_path / "megatron", tmp_path / "back", **QUIET)
    assert_same_folder(tmp_path / "back", source)

    convert_hf_to_mcore(source, tmp_path / "cast", dtype="float32", **QUIET)
    convert_mcore_to_hf(tmp_path / "cast", tmp_path / "cast-back", **QUIET)
    cast = tensors_of(tmp_path / "cast-back")
    assert all(torch.equal(cast[n], t.float()) and cast[n].dtype == torch.float32 for n, t in tensors.items())
    assert json.loads((tmp_path / "cast-back/config.json").read_text())["dtype"] == "float32"


def test_block_quantized_fp8_is_dequantized(tmp_path: Path) -> None:
    """Blocks are 16x16. Sizes 32 and 48 split into whole blocks, size 102 does not."""
    source = save(CASES["qwen3_moe"], tmp_path / "hf")
    expected, stored = tensors_of(source), {}
    for name, tensor in tensors_of(source).items():
        stored[name] = tensor
        if tensor.dim() == 2 and "embed" not in name and "gate.weight" not in name:
            rows, columns = (-(-n // 16) for n in tensor.shape)
            scale = torch.rand(rows, columns) + 0.5
            wide = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
            stored[name] = (tensor.float() / wide).to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scale
            expected[name] = (stored[name].float() * wide).bfloat16()
    assert len(stored) > len(expected) + 30
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    edit_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    convert_hf_to_mcore(source, tmp_path / "megatron", **QUIET)
    convert_mcore_to_hf(tmp_path / "megatron", tmp_path / "back", **QUIET)
    found = tensors_of(tmp_path / "back")
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def test_a_stored_copy_of_a_tied_output_layer_is_left_out(tmp_path: Path) -> None:
    source = save(CASES["qwen3"], tmp_path / "hf")
    tensors = tensors_of(source)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    convert_hf_to_mcore(source, tmp_path / "megatron", **QUIET)
    convert_mcore_to_hf(tmp_path / "megatron", tmp_path / "back", **QUIET)
    assert tensors_of(tmp_path / "back").keys() == tensors.keys()


def test_every_saved_piece_is_an_archive_with_valid_checksums(tmp_path: Path) -> None:
    source = save(CASES["mixtral"], tmp_path / "hf")
    convert_hf_to_mcore(source, tmp_path / "megatron", **QUIET)
    weights = find_checkpoint(tmp_path / "megatron").open()
    count = 0
    for saved in weights._saved.values():  # type: ignore[union-attr]
        for chunk in saved.chunks:
            with (tmp_path / "megatron" / chunk.file).open("rb") as file:
                file.seek(chunk.start)
                (tmp_path / "one").write_bytes(file.read(chunk.length))
            with zipfile.ZipFile(tmp_path / "one") as archive:
                assert archive.testzip() is None
            assert torch.load(tmp_path / "one", weights_only=True).shape == chunk.shape
            count += 1
    assert count > 60


def test_a_piece_beyond_4_gib_is_an_archive_that_torch_loads(tmp_path: Path) -> None:
    """The file is sparse except for the last element."""
    shape = (5, 1 << 30)
    frame = frame_of("BF16", shape)
    after = bytearray(frame.after)
    for offset in frame.crc_offsets:
        assert after[offset : offset + 4] == bytes(4)
        after[offset : offset + 4] = (77).to_bytes(4, "little")
    path = tmp_path / "one"
    with path.open("wb") as file:
        file.write(frame.before)
        file.seek(2 * prod(shape) - 2, io.SEEK_CUR)
        file.write(torch.ones(1).bfloat16().view(torch.uint8).numpy().tobytes() + after)
    with path.open("rb") as file:
        assert find_tensor(file) == FoundTensor("BF16", shape, len(frame.before), 77)
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert (loaded.shape, loaded[-1, -1].item()) == (shape, 1.0)
