"""Checkpoints that we write, in transformers: they load with nothing missing, and compute what the one they came from did."""
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from checkpoint_tool import grpo_group, oracle, read_model, relative, tool
from conftest import GOLDEN, WITHIN, gradients, group, write_lines
from test_lora import recorded, vocabulary

# Prefixes, all experts in one tensor, 8-bit weights, shards, tied weights, older names, float16, a vision tower, and every family.
VARIANTS = ("llama_sharded", "llama_float16", "llama3_rope_tied", "qwen3_bfloat16", "qwen3_next", "qwen3_next_old_keys", "qwen3_5_tied",
            "qwen3_5_moe_fused", "qwen3_5_moe_multimodal", "glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa_old_keys",
            "mamba2_bfloat16", "nemotron_h_old_keys", "granitemoehybrid_old_keys", "falcon_h1", "bamba", "smollm3")


def log_probs(model, rows):
    with oracle.precision(torch.float64), torch.no_grad():
        return torch.cat(grpo_group(model, rows)[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_unchanged_weights_are_the_same_model_bit_for_bit(variant, tmp_path):
    saved = tool("save", GOLDEN / variant, tmp_path / "saved", "float64")
    rows = group(vocab=vocabulary(variant))
    before, after = (read_model(folder, torch.float64) for folder in (GOLDEN / variant, saved))
    tensors = [dict(model.state_dict()) | dict(model.named_buffers()) for model in (before, after)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    # Not bit for bit: transformers computes with weights where they lie in the file, and a product's rounding depends on that.
    assert relative([log_probs(after, rows)], [log_probs(before, rows)]) <= 1e-10
    config = json.loads((saved / "config.json").read_text())
    assert "float64" in (config.get("dtype"), config.get("torch_dtype"))


@pytest.mark.parametrize("variant", (*VARIANTS, "deepseek_v3_fp8"))
def test_changed_weights_load_whole_and_give_our_log_probs(variant, tmp_path):
    saved = tool("save", GOLDEN / variant, tmp_path / "saved", "float64", "changed")
    _, told = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"], told
    rows = group(vocab=vocabulary(variant))
    rollouts = write_lines(tmp_path / "r.jsonl", rows)
    done = gradients("exact", saved, rollouts, tmp_path / "e.h5", "--set", "model.dtype=float64")
    assert done.status == WITHIN, done
    assert relative([recorded(tmp_path / "e.h5")[1]], [log_probs(read_model(saved, torch.float64), rows)]) <= 1e-10


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_eight_bit_weights_become_the_dtype_of_the_run(dtype, tmp_path):
    source = GOLDEN / "deepseek_v3_fp8"
    saved = tool("save", source, tmp_path / "saved", dtype)
    config = json.loads((saved / "config.json").read_text())
    assert "quantization_config" not in config and dtype in (config.get("dtype"), config.get("torch_dtype"))
    with safe_open(source / "model.safetensors", "pt") as before, safe_open(saved / "model.safetensors", "pt") as after:
        names = {name for name in before.keys() if not name.endswith("_scale_inv")}
        assert set(after.keys()) == names
        eight_bit = [name for name in names if before.get_slice(name).get_dtype() == "F8_E4M3"]
        # Those of the layer for multi-token prediction too, which are not run: without quantization_config nobody would know
        # what their bits mean.
        assert len(eight_bit) > 10 and any(name.startswith("model.layers.2.") for name in eight_bit)
        for name in eight_bit:
            scale = before.get_tensor(name + "_scale_inv").double()
            stored = before.get_tensor(name).double()
            rows, columns = json.loads((source / "config.json").read_text())["quantization_config"]["weight_block_size"]
            spread = scale.repeat_interleave(rows, 0)[:stored.shape[0]].repeat_interleave(columns, 1)[:, :stored.shape[1]]
            wanted = (stored * spread).to(torch.float32).to(getattr(torch, dtype))
            assert torch.equal(after.get_tensor(name), wanted), name


def test_an_infinity_is_written_as_the_source_has_it(tmp_path):
    for variant in ("mamba2", "mamba2_bfloat16"):
        saved = tool("save", GOLDEN / variant, tmp_path / variant, "float32")
        before, after = ((folder / "config.json").read_text() for folder in (GOLDEN / variant, saved))
        assert "Infinity" in before
        assert before.count("__float__") == after.count("__float__") and before.count("Infinity") == after.count("Infinity")
        assert json.loads(before)["time_step_limit"] == json.loads(after)["time_step_limit"]
