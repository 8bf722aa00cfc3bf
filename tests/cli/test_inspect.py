"""longstraw inspect."""
import json

import pytest

from conftest import GOLDEN, WITHIN, gradients, refused, run, write_lines


def both(path):
    """What inspect says of `path`: as JSON, and as text."""
    as_json, as_text = run("inspect", path, "--json"), run("inspect", path)
    assert as_json.status == as_text.status == WITHIN, (as_json, as_text)
    return as_json.json, as_text.out


@pytest.mark.parametrize("variant", ("smollm2", "llama_sharded", "qwen3_bfloat16"))
def test_a_checkpoint(variant):
    folder = GOLDEN / variant
    config = json.loads((folder / "config.json").read_text())
    said, text = both(folder)
    assert said["architecture"]["model_type"] == config["model_type"] and said["architecture"]["vocab_size"] == config["vocab_size"]
    assert len(said["files"]) == len(list(folder.glob("model*.safetensors")))
    bytes_each = 2 if variant == "qwen3_bfloat16" else 4
    heads, size = config["num_key_value_heads"], config["head_dim"]
    assert said["state_bytes_per_token"] == 2 * config["num_hidden_layers"] * heads * size * bytes_each
    assert "state_bytes_per_token" in text and config["model_type"] in text


def test_the_checkpoint_of_a_configuration(model):
    assert run("inspect", "--set", f"model.path={model}", "--json").json["architecture"]["model_type"] == "llama"


def test_a_tensor_file(model):
    said, text = both(model / "model.safetensors")
    assert said["format"] == "safetensors" and said["elements"] == sum(int(__import__("math").prod(t["shape"])) for t in said["tensors"])
    assert "model.embed_tokens.weight" in text


def test_a_rollouts_file(rollouts):
    said, text = both(rollouts)
    assert said["responses"] == 4 and said["prompt_tokens"]["max"] == 21 and said["response_tokens"]["total"] == 22
    assert "responses: 4" in text


def test_a_prompts_file(tmp_path):
    said, _ = both(write_lines(tmp_path / "p.jsonl", [{"prompt_id": "a", "prompt": "hello", "answer": 1}]))
    assert said["format"] == "longstraw-prompts" and said["prompts"] == 1


def test_a_record(model, rollouts, tmp_path):
    gradients("exact", model, rollouts, tmp_path / "r.h5")
    said, text = both(tmp_path / "r.h5")
    assert said["closed"] is True and said["header"]["arm"] == "exact" and len(said["steps"]) == 1
    assert "model.embed_tokens.weight" in text and "peak_bytes" in text


def test_what_is_not_there_is_named(tmp_path):
    refused("inspect", tmp_path / "none", names=["none"])
    refused("inspect", tmp_path, names=["config.json"])
    refused("inspect", names=["FILE"])


@pytest.mark.parametrize("name", ("text.h5", "text.safetensors", "text.jsonl"))
@pytest.mark.parametrize("content", (b"", b"hello\n", b"\x00" * 4096, b"\x89HDF\r\n\x1a\n" + b"\xff" * 100))
def test_a_file_that_is_not_what_its_name_says_is_refused(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    refused("inspect", tmp_path / name, names=[name])
