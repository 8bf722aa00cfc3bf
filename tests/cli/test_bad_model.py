"""Checkpoints that can't be used: refused with file, key and value; nothing is written."""
import json
import struct

import pytest

from conftest import gradients, leftovers, refused


def header_of(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + size]), data[8 + size:]


def rewrite(path, change):
    """Rewrites a tensor file after `change(header, body)`, which may return another body."""
    header, body = header_of(path)
    body = change(header, bytearray(body)) or body
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(body))


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def first_tensor(header):
    return next(name for name in header if name != "__metadata__")


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    return ["model.safetensors"]


def cut_in_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    return ["model.safetensors"]


def header_longer_than_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    return ["model.safetensors"]


def header_no_json(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"!" + data[9:])
    return ["model.safetensors"]


def offsets_beyond_file(folder):
    def change(header, body):
        header[first_tensor(header)]["data_offsets"][1] += 1 << 40

    rewrite(folder / "model.safetensors", change)
    return ["model.safetensors"]


def shape_that_lies(folder):
    def change(header, body):
        header["model.norm.weight"]["shape"] = [1 << 40, 1 << 40]

    rewrite(folder / "model.safetensors", change)
    return ["model.safetensors", "model.norm.weight"]


def unknown_dtype(folder):
    def change(header, body):
        header["model.norm.weight"]["dtype"] = "F7"

    rewrite(folder / "model.safetensors", change)
    return ["model.safetensors", "model.norm.weight", "F7"]


def not_a_number(folder):
    def change(header, body):
        begin = header["model.norm.weight"]["data_offsets"][0]
        body[begin + 8:begin + 12] = struct.pack("<f", float("nan"))
        return body

    rewrite(folder / "model.safetensors", change)
    return ["model.safetensors", "model.norm.weight", "2"]


def renamed_tensor(folder):
    def change(header, body):
        header["model.norm.wait"] = header.pop("model.norm.weight")

    rewrite(folder / "model.safetensors", change)
    return ["model.norm.weight"]


def no_tensor_file(folder):
    (folder / "model.safetensors").unlink()
    return ["model.safetensors"]


def no_config(folder):
    (folder / "config.json").unlink()
    return ["config.json"]


def config_no_json(folder):
    (folder / "config.json").write_text("{")
    return ["config.json"]


def unknown_model_type(folder):
    edit_json(folder / "config.json", model_type="lama")
    return ["config.json", "lama", "llama"]


def unsupported_activation(folder):
    edit_json(folder / "config.json", hidden_act="gelu")
    return ["config.json", "hidden_act", "gelu"]


def heads_that_do_not_divide(folder):
    edit_json(folder / "config.json", num_key_value_heads=5)
    return ["config.json", "num_key_value_heads"]


def wrong_size(folder):
    edit_json(folder / "config.json", intermediate_size=17)
    return ["mlp", "17"]


def negative_layers(folder):
    edit_json(folder / "config.json", num_hidden_layers=-1)
    return ["config.json", "num_hidden_layers", "-1"]


WHOLE = [cut_short, cut_in_header, header_longer_than_file, header_no_json, offsets_beyond_file, shape_that_lies, unknown_dtype,
         not_a_number, renamed_tensor, no_tensor_file, no_config, config_no_json, unknown_model_type, unsupported_activation,
         heads_that_do_not_divide, wrong_size, negative_layers]


@pytest.mark.parametrize("spoil", WHOLE, ids=lambda f: f.__name__)
def test_a_spoilt_checkpoint_is_refused(spoil, copy_of, rollouts, tmp_path):
    folder = copy_of("smollm2")
    names = spoil(folder)
    refused("gradients", "--arm", "exact", "--model", folder, "--rollouts", rollouts, "--out", tmp_path / "r.h5", names=names)
    assert leftovers(tmp_path, "smollm2", "rollouts.jsonl") == []


def missing_shard(folder):
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    return [victim.name]


def truncated_shard(folder):
    victim = sorted(folder.glob("model-*.safetensors"))[2]
    victim.write_bytes(victim.read_bytes()[:-1])
    return [victim.name]


def index_names_what_is_not_there(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = sorted(folder.glob("model-*.safetensors"))[0].name
    path.write_text(json.dumps(index))
    return ["model.norm.weight"]


def shard_outside_the_folder(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index))
    return ["elsewhere.safetensors"]


@pytest.mark.parametrize("spoil", [missing_shard, truncated_shard, index_names_what_is_not_there, shard_outside_the_folder],
                         ids=lambda f: f.__name__)
def test_a_spoilt_sharded_checkpoint_is_refused(spoil, copy_of, rollouts, tmp_path):
    folder = copy_of("llama_sharded")
    names = spoil(folder)
    refused("gradients", "--arm", "exact", "--model", folder, "--rollouts", rollouts, "--out", tmp_path / "r.h5", names=names)
    assert leftovers(tmp_path, "llama_sharded", "rollouts.jsonl") == []


@pytest.mark.parametrize("spoil", [cut_short, header_longer_than_file, shape_that_lies, unknown_model_type, no_config],
                         ids=lambda f: f.__name__)
def test_inspect_refuses_it_too(spoil, copy_of):
    folder = copy_of("smollm2")
    refused("inspect", folder, names=spoil(folder))


def test_the_copy_itself_is_fine(copy_of, rollouts, tmp_path):
    """Without this the tests above could pass for another reason."""
    for variant in ("smollm2", "llama_sharded"):
        assert gradients("exact", copy_of(variant), rollouts, tmp_path / "r.h5").status == 0


def test_a_missing_folder_is_named(rollouts, tmp_path):
    refused("gradients", "--arm", "exact", "--model", tmp_path / "nowhere", "--rollouts", rollouts, "--out", tmp_path / "r.h5", names=["nowhere"])


def test_a_device_that_is_not_there_is_named(model, rollouts, tmp_path):
    refused("gradients", "--arm", "exact", "--model", model, "--rollouts", rollouts, "--out", tmp_path / "r.h5",
            "--set", "model.device=cuda:99", names=["cuda:99"], status=(2, 3))
