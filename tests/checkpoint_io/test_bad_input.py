"""Input that cannot be converted is refused in one line with the input and the remedy. No partial output is left."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import convert_hf_to_mcore
import convert_mcore_to_hf
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint_io.families import CASES, edit_config, save, tensors_of

ROOT = Path(__file__).resolve().parents[2]
SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def truncated_shard(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])


def index_names_missing_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.input_layernorm.weight"] = SHARD
    (folder / INDEX).write_text(json.dumps(index))


def index_lacks_a_tensor(folder: Path) -> None:
    tensors = tensors_of(folder)
    tensors.pop("model.norm.weight")
    one_file(folder, tensors)


def wrong_shape(folder: Path) -> None:
    edit_config(folder, vocab_size=999)


def unknown_dtype(folder: Path) -> None:
    tensors = tensors_of(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    one_file(folder, tensors)


def fp8_without_scales(folder: Path) -> None:
    tensors = tensors_of(folder)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    one_file(folder, tensors)


def unknown_tensor(folder: Path) -> None:
    one_file(folder, tensors_of(folder) | {"model.layers.0.mlp.gate_proj.bias": torch.ones(48)})


def unknown_type(folder: Path) -> None:
    edit_config(folder, model_type="gpt2")


def config_without_field(folder: Path) -> None:
    edit_config(folder, num_attention_heads=None)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def overlapping_tensors(folder: Path) -> None:
    """Let one norm point to the bytes of another norm. The number of bytes is correct."""
    data = (folder / SHARD).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    norms = [name for name, entry in header.items() if name.endswith("norm.weight") and len(entry["shape"]) == 1]
    header[norms[1]]["data_offsets"] = header[norms[0]]["data_offsets"]
    text = json.dumps(header).encode()
    (folder / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def not_a_checkpoint(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()


def broken_bin(folder: Path) -> None:
    not_a_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no archive")


def cut_bin(folder: Path) -> None:
    not_a_checkpoint(folder)
    path = folder / "pytorch_model.bin"
    torch.save({"model.norm.weight": torch.ones(3000)}, path)
    path.write_bytes(path.read_bytes()[:9000])


def cut_bin_to_nothing(folder: Path) -> None:
    not_a_checkpoint(folder)
    (folder / "pytorch_model.bin").touch()


def bin_index_leads_out(folder: Path) -> None:
    not_a_checkpoint(folder)
    torch.save({"model.norm.weight": torch.ones(32)}, folder.parent.parent / "other.bin")
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "../../other.bin"}})
    )


def code_in_bin(folder: Path) -> None:
    not_a_checkpoint(folder)
    torch.save({"model.norm.weight": Path("/")}, folder / "pytorch_model.bin")


def tied_but_different(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)


def one_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    not_a_checkpoint(folder)
    save_file(tensors, folder / "model.safetensors")


def no_space(folder: Path) -> None:
    """Write a vocabulary of four terabytes as a sparse file."""
    rows = 1 << 35
    tensors = {"model.embed_tokens.weight": (rows, 32)} | {
        name: tuple(t.shape) for name, t in tensors_of(folder).items() if name not in ("model.embed_tokens.weight",)
    }
    tensors["lm_head.weight"] = (rows, 32)
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    not_a_checkpoint(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    edit_config(folder, vocab_size=rows)


REFUSED: dict[Callable[[Path], None], str] = {
    missing_shard: rf"{SHARD} is named by .* but does not exist; fetch the missing shard",
    truncated_shard: rf"{SHARD} cannot be read \(it is cut short: \d+ bytes of \d+\); fetch the file again",
    index_names_missing_tensor: (
        rf"{INDEX} names 'model.layers.9.input_layernorm.weight' in {SHARD}, but that file does not"
    ),
    index_lacks_a_tensor: "has no tensor 'model.norm.weight'; fetch the checkpoint again",
    wrong_shape: r"embed_tokens.weight has shape \[102, 32\], but config.json means \[999, 32\]; give the config.json",
    unknown_dtype: "model.norm.weight has dtype I8, none of F64, F32, F16, BF16; give one that is not quantized",
    fp8_without_scales: "has dtype F8_E4M3, .* there is no model.norm.weight_scale_inv; give one that is not quantized",
    unknown_tensor: "holds 'model.layers.0.mlp.gate_proj.bias', unknown to its model type; check model_type",
    unknown_type: (
        "model_type 'gpt2' is not known; known are deepseek_v2, deepseek_v3, glm4_moe, glm4_moe_lite, llama, mistral,"
        " mixtral, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe"
    ),
    config_without_field: "config.json has no field 'num_attention_heads'",
    no_config: "config.json does not exist; give the folder of a Hugging Face checkpoint",
    broken_config: "config.json is not JSON .*; restore the file",
    not_a_checkpoint: (
        "is not a checkpoint: it has neither model.safetensors, .* nor .metadata with metadata.json; give one"
    ),
    broken_bin: r"pytorch_model.bin cannot be read by torch's weights-only loader \(.*\); use safetensors",
    cut_bin: r"pytorch_model.bin is cut short: it ends without a zip archive's directory; fetch the file again",
    cut_bin_to_nothing: r"pytorch_model.bin is cut short: it ends without",
    bin_index_leads_out: (
        r"pytorch_model.bin.index.json names '../../other.bin', outside of its folder; fetch index and shards"
    ),
    overlapping_tensors: rf"{SHARD} cannot be read \(its header has .*norm.weight overlap .*norm.weight\); fetch",
    code_in_bin: r"pytorch_model.bin cannot be read by torch's weights-only loader \(.*\); use safetensors",
    tied_but_different: (
        "lm_head.weight is not model.embed_tokens.weight, though config.json has tie_word_embeddings=true; "
    ),
    no_space: r"has \d+\.\d GB free, but 8796\.\d GB are needed; free some",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(CASES["llama2"], tmp_path_factory.mktemp("sound") / "hf", max_shard_size="100KB")


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("damage", REFUSED, ids=lambda f: f.__name__)
def test_bad_input_is_refused_in_one_line(
    damage: Callable[[Path], None], sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(sound, tmp_path / "hf")
    assert (folder / SHARD).exists()
    damage(folder)
    assert convert_hf_to_mcore.main([str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(REFUSED[damage], error), error
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_nan_is_named_and_converted(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(sound, tmp_path / "hf")
    tensors = tensors_of(folder)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    tensors["lm_head.weight"][0, 0] = float("-inf")
    one_file(folder, tensors)
    assert convert_hf_to_mcore.main([str(folder), str(tmp_path / "out")]) == 0
    expected = "warning: NaN or infinity in 2 tensors: lm_head.weight; model.layers.1.mlp.up_proj.weight\n"
    assert capsys.readouterr().err == expected
    assert convert_mcore_to_hf.main([str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert capsys.readouterr().err == expected
    assert tensors_of(tmp_path / "back")["lm_head.weight"].isinf().sum() == 1


def test_an_output_that_exists_is_left_alone(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes").write_text("mine")
    for tool in (convert_hf_to_mcore, convert_mcore_to_hf):
        assert tool.main([str(sound), str(tmp_path / "out")]) == 2
        line = f"grpo-mega: error: {tmp_path / 'out'} exists; remove it or name another output\n"
        assert capsys.readouterr().err == line
    assert convert_hf_to_mcore.main([str(sound), str(tmp_path / "none/out")]) == 2
    assert "the parent of out" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["notes"]


def test_a_closed_output_pipe_is_no_error_of_a_script(sound: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(ROOT / "tools/inspect_checkpoint.py"), str(sound)]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert (result.returncode, result.stderr) == (130, "")


def lost_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def cut_file(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:1000])


def overwritten_file(folder: Path) -> None:
    size = (folder / "__0_0.distcp").stat().st_size
    (folder / "__0_0.distcp").write_bytes(b"x" * size)


def broken_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04nothing")


def other_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=7)


def other_family(folder: Path) -> None:
    edit_config(folder, model_type="qwen3")


def lost_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def flipped_bit(folder: Path) -> None:
    """Flip the lowest mantissa bit of a weight. Only the checksum can detect it."""
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(bytes(data[: first_blob(data)]))) as archive:
        place = archive.getinfo("archive/data/0").header_offset
    names, extra = struct.unpack("<HH", data[place + 26 : place + 30])
    data[place + 30 + names + extra + 8] ^= 1
    path.write_bytes(data)


def flipped_bit_of_its_description(folder: Path) -> None:
    """Flip a bit in the pickled description of the tensor."""
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.index(b"OrderedDict")
    data[at] ^= 1
    path.write_bytes(data)


def first_blob(data: bytearray) -> int:
    """Return the offset at which the first saved piece of a file ends."""
    return data.index(b"PK\x05\x06") + 22


REFUSED_BACK: dict[Callable[[Path], None], str] = {
    lost_file: "__0_0.distcp does not exist, but .metadata names it; fetch the missing file",
    cut_file: r"__0_0.distcp is cut short: 1000 bytes of \d+; fetch the file again",
    overwritten_file: r"__0_0.distcp is damaged at byte 0 \(is no archive of torch.save\); save the checkpoint again",
    flipped_bit: r"__0_0.distcp: model.embed_tokens.weight is damaged: the 13056 bytes at offset \d+ do not match",
    flipped_bit_of_its_description: r"__0_0.distcp is damaged at byte 0 \(describes its tensor in bytes that do not",
    broken_metadata: r".metadata cannot be read \(.*\); save the checkpoint again",
    other_layers: (
        r"layer_norm_weight has shape \[8, 32\], but config.json means \[7, 32\]; give the config.json that belongs"
    ),
    other_family: "holds no 'decoder.layers.self_attention.q_layernorm.weight'; give the config.json that belongs",
    lost_config: "has no config.json, and no run's config.yaml names a folder with one; name the folder with --config",
}


@pytest.fixture(scope="module")
def converted(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "megatron"
    assert convert_hf_to_mcore.main([str(sound), str(out)]) == 0
    return out


@pytest.mark.parametrize("damage", REFUSED_BACK, ids=lambda f: f.__name__)
def test_a_damaged_megatron_checkpoint_is_refused_in_one_line(
    damage: Callable[[Path], None], converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(converted, tmp_path / "megatron")
    damage(folder)
    assert convert_mcore_to_hf.main([str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(REFUSED_BACK[damage], error), error
    assert [p.name for p in tmp_path.iterdir()] == ["megatron"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int4"], "--dtype=int4 is not known; use one of bfloat16, float16, float32, float64"),
        (["--layout", "tp=2"], "--layout=tp=2: must go with --dry"),
        (["--max-shard-size", "1GB"], "--max-shard-size=1GB: must go with a Megatron checkpoint"),
        (["--config", "other"], "--config=other: must go with a Megatron checkpoint"),
        (["--dry"], "/out: must not be given with --dry"),
        (["--workers", "0"], "--workers=0: must be a whole number above 0"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], message: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert_hf_to_mcore.main([str(sound), str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["5", "0GB", "GB", "5XB", "-1GB"])
def test_a_shard_size_is_a_number_with_a_unit(
    size: str, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = convert_mcore_to_hf.main([str(converted), str(tmp_path / "out"), f"--max-shard-size={size}"])
    line = f"grpo-mega: error: --max-shard-size={size}: must be a size such as 5GB or 500MiB\n"
    expected = (0, "") if size == "5" else (2, line)
    assert (code, capsys.readouterr().err) == expected
