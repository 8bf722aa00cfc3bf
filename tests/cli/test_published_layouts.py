"""Checkpoints as they are published, from the outside: what is left out or converted is said, what can't be is refused."""
import json

import h5py
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import GOLDEN, WITHIN, gradients, refused


def names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def counted(count, what):
    return f"model: skipped {count} tensor{'' if count == 1 else 's'} of {what}*"


@pytest.mark.parametrize("variant, skipped, prefix", [
    ("deepseek_v3_fp8", ("model.layers.2.",), ""),
    ("qwen3_5_multimodal", ("model.visual.", "mtp."), "model.language_model."),
])
def test_parts_that_are_not_run_are_skipped_and_said_so(variant, skipped, prefix, rollouts, tmp_path):
    folder = GOLDEN / variant
    done = gradients("reference", folder, rollouts, tmp_path / "r.h5", "--set", "model.dtype=float64")
    assert done.status == WITHIN, done
    stored = names(folder)
    for part in skipped:
        count = sum(name.startswith(part) for name in stored)
        assert count > 0 and counted(count, part) in done.err, done
    scaled = sum(name.endswith("_scale_inv") and not name.startswith(skipped) for name in stored)
    assert (f"model: dequantized {scaled} float8 tensors" in done.err) == (scaled > 0), done
    with h5py.File(tmp_path / "r.h5") as file:
        ours = set(file["steps/000000/gradients"])
    constants = {name for name in stored if name.endswith("e_score_correction_bias")}
    wanted = {name.replace(prefix, "model.") if prefix else name for name in stored
              if not name.startswith(skipped) and not name.endswith("_scale_inv") and name not in constants}
    assert ours == wanted


def test_a_plain_checkpoint_has_nothing_to_say(rollouts, model, tmp_path):
    done = gradients("reference", model, rollouts, tmp_path / "r.h5")
    assert done.status == WITHIN and "model:" not in done.err, done


def test_a_faulty_layout_is_refused_by_name(copy_of, rollouts, tmp_path):
    def gradients_of(folder, *named):
        refused("gradients", "--arm", "reference", "--model", folder, "--rollouts", rollouts, "--out", tmp_path / "r.h5", names=named)
        assert not (tmp_path / "r.h5").exists()

    folder = copy_of("deepseek_v3_fp8")
    tensors = load_file(folder / "model.safetensors")
    scale = next(name for name in tensors if name.startswith("model.layers.0.") and name.endswith("_scale_inv"))
    save_file({name: value for name, value in tensors.items() if name != scale}, folder / "model.safetensors")
    gradients_of(folder, folder, scale, "missing")

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (folder / "config.json").write_text(json.dumps(config))
    gradients_of(folder, "config.json", "quantization_config.quant_method", "gptq")
