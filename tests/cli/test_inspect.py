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


CONFIGS = GOLDEN.parent / "configs"


# Bytes of a prefix of 2,097,152 tokens, worked out by hand from the published configurations.
@pytest.mark.parametrize("name, per_token, fixed", (
    ("qwen3.6-27b", 65536, 153944064), ("qwen3.6-35b-a3b", 20480, 64389120), ("qwen3-next-80b-a3b", 24576, 77266944),
    ("glm-5", 109824, 0), ("glm-5.2", 95232, 0), ("deepseek-v3.2", 85888, 0),
    ("llama-3.1-8b", 131072, 0), ("mistral-7b-v0.1", 0, 536739840), ("mamba2-2.7b", 0, 169836544)))
def test_a_configuration_alone(name, per_token, fixed):
    said = run("inspect", CONFIGS / name, "--tokens", 2097152, "--json").json
    assert said["state_dtype"] == "bfloat16" and "files" not in said
    assert said["state_bytes_per_token"] == per_token and said["state_fixed_bytes"] == fixed
    assert said["prefix"]["state_bytes"] == 2097152 * per_token + fixed
    assert sum(kind["state_bytes"] for kind in said["layer_kinds"]) == said["prefix"]["state_bytes"]


def test_a_configuration_alone_as_text():
    text = run("inspect", CONFIGS / "qwen3.6-27b", "--tokens", 2097152).out
    assert "gated delta rule" in text and "(146.8 MiB)" in text and "(128.14 GiB)" in text


def test_an_exact_gradient_over_a_prefix():
    said = run("inspect", CONFIGS / "glm-5.2", "--tokens", 1000, "--json").json["prefix"]["exact_gradient"]
    assert said["adjoint_bytes"] == 1000 * 78 * 576 * 4, "float32 latents; the indexer's keys have no adjoint"
    assert said["expert_choice_bytes"] == 1000 * 75 * 8 * 2
    windowed = run("inspect", CONFIGS / "mistral-7b-v0.1", "--tokens", 10000, "--json").json["prefix"]
    assert windowed["state_bytes"] == 4095 * 131072, "the window less the token that reads it"
    assert windowed["exact_gradient"]["state_bytes"] == 10000 * 131072, "a backward pass comes by every token"
    hybrid = run("inspect", CONFIGS / "qwen3.6-27b", "--tokens", 10000, "--json").json["prefix"]["exact_gradient"]
    assert hybrid["bytes_per_segment_border"] == 153944064


def test_experts_and_the_parameters_that_a_token_passes():
    said = run("inspect", CONFIGS / "nemotron-3-nano-30b-a3b", "--json").json
    (experts,) = said["experts"]
    assert experts == {"layers": 23, "experts": 128, "chosen_per_token": 6, "width": 1856, "shared_width": 3712,
                       "parameters_of_one": 2 * 1856 * 2688}
    assert said["parameters"] - said["parameters_active_per_token"] == 23 * (128 - 6) * experts["parameters_of_one"]
    assert "prefix" not in said and "experts" not in run("inspect", CONFIGS / "mamba2-2.7b", "--json").json


def test_the_dtype_of_a_run():
    narrow, wide = (run("inspect", GOLDEN / "mamba2", "--dtype", dtype, "--json").json for dtype in ("bfloat16", "float32"))
    config = json.loads((GOLDEN / "mamba2" / "config.json").read_text())
    recurrent = config["num_hidden_layers"] * config["num_heads"] * config["head_dim"] * config["state_size"]
    columns = config["num_hidden_layers"] * 3 * (config["num_heads"] * config["head_dim"] + 2 * config["n_groups"] * config["state_size"])
    assert narrow["state_fixed_bytes"] == 4 * recurrent + 2 * columns and wide["state_fixed_bytes"] == 4 * (recurrent + columns)


@pytest.mark.parametrize("tokens", ("0", "-1", "many", "1000000000001"))
def test_a_number_of_tokens_that_is_none_is_refused(tokens, model):
    refused("inspect", model, "--tokens", tokens, names=["--tokens"])


def test_tokens_and_dtype_are_of_a_checkpoint(model, rollouts):
    refused("inspect", rollouts, "--tokens", "5", names=["--tokens", rollouts])
    refused("inspect", rollouts, "--dtype", "float32", names=["--dtype", rollouts])
    refused("inspect", model, "--dtype", "int8", names=["dtype", "int8", "bfloat16"])


def test_an_index_without_its_shards_is_refused_and_not_taken_for_a_configuration_alone(copy_of):
    folder = copy_of("llama_sharded")
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    refused("inspect", folder, names=["safetensors"])


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
