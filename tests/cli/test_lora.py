"""Low-rank adapters against PEFT itself: its adapters in our runs, ours in its models, and what merging makes of the weights."""
import json
import warnings

import h5py
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from checkpoint_tool import BOUND, grpo_group, oracle, read_model, relative, tool
from conftest import ARMS, GOLDEN, WITHIN, gradients, group, refused, run, write_lines

# One family of each kind of linear layer, and what has another name in transformers than in the file.
VARIANTS = ("llama", "llama_bias", "qwen3_next", "qwen3_5_moe_multimodal", "deepseek_v3", "glm_moe_dsa", "mamba2",
            "nemotron_h_latent", "falcon_h1", "granitemoehybrid")
NOT_HERE = {"kv_b_proj", "wq_b", "wk", "weights_proj"}
# PEFT 0.21 refuses the first, and makes the others' names those of fused experts (core/model/lora.h).
NOT_IN_PEFT = dict.fromkeys(("mamba2", "nemotron_h", "falcon_h1"), {"out_proj"}) | dict.fromkeys(
    ("glm4_moe", "qwen3_next", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"), {"gate_proj", "up_proj", "down_proj"})


def linear_modules(model):
    """The names of those that can have an adapter, here and there."""
    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    return names - NOT_HERE - NOT_IN_PEFT.get(model.config.model_type, set())


def vocabulary(variant):
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


def peft_model(variant, dtype):
    """With A and B of the size of weights: a new B would be zero, and no A would have a gradient."""
    base = read_model(GOLDEN / variant, dtype)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=sorted(linear_modules(base)), task_type="CAUSAL_LM")
    model = get_peft_model(base, config).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model.eval()


def recorded(path):
    with h5py.File(path) as file:
        step = file["steps/000000"]
        gradient = {name: data[...] for name, data in step["gradients"].items()}
        return gradient, step["responses/policy_logprobs"][...]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_log_probs_and_gradients_are_those_of_peft(variant, dtype, tmp_path):
    rows = group(vocab=vocabulary(variant))
    torch_dtype = getattr(torch, dtype)
    model = peft_model(variant, torch_dtype)
    model.save_pretrained(tmp_path / "adapter")
    with oracle.precision(torch_dtype):
        loss, logprobs = grpo_group(model.base_model.model, rows)
        names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
        wanted = {n.replace(".default.", "."): g for n, g in zip(names, torch.autograd.grad(loss, parameters))}
    rollouts = write_lines(tmp_path / "r.jsonl", rows)
    # In float32 both are compared at their own rounding; small models of the recurrent kind amplify it.
    for arm in ("exact", "reference"):
        out = tmp_path / f"{arm}.h5"
        done = gradients(arm, GOLDEN / variant, rollouts, out, "--set", f"model.dtype={dtype}",
                         "--set", "longstraw.segment_tokens=8", "--set", f"lora.adapter={tmp_path / 'adapter'}")
        assert done.status == WITHIN, done
        gradient, ours = recorded(out)
        assert gradient.keys() == wanted.keys()
        assert relative([ours], [torch.cat(logprobs).detach()]) <= BOUND[dtype]
        assert relative([gradient[n] for n in sorted(gradient)], [wanted[n] for n in sorted(gradient)]) <= BOUND[dtype]
        if dtype == "float64":
            whole = sum(float(value.norm()) ** 2 for value in wanted.values()) ** 0.5
            for name, value in wanted.items():
                if float(value.norm()) > 1e-6 * whole:
                    assert relative([gradient[name]], [value]) <= BOUND[dtype], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_adapter_loads_in_peft_and_gives_the_same_log_probs(variant, tmp_path):
    rows = group(vocab=vocabulary(variant))
    adapter = tool("new_adapter", GOLDEN / variant, tmp_path / "adapter", "float64", 4, 6, "all-linear")
    base = read_model(GOLDEN / variant, torch.float64)
    with oracle.precision(torch.float64):
        before = torch.cat(grpo_group(base, rows)[1]).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")   # PEFT only warns of adapters that it misses or has no use for
        model = PeftModel.from_pretrained(base, adapter).to(torch.float64).eval()
    with oracle.precision(torch.float64):
        after = torch.cat(grpo_group(model.base_model.model, rows)[1]).detach()
    rollouts = write_lines(tmp_path / "r.jsonl", rows)
    done = gradients("exact", GOLDEN / variant, rollouts, tmp_path / "e.h5", "--set", "model.dtype=float64",
                     "--set", f"lora.adapter={adapter}")
    assert done.status == WITHIN, done
    ours = recorded(tmp_path / "e.h5")[1]
    assert relative([ours], [after]) <= BOUND["float64"]
    assert relative([ours], [before]) > 1e-3   # the adapter does something


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_linear_is_every_linear_module_of_transformers_that_both_can_have(variant, tmp_path):
    adapter = tool("new_adapter", GOLDEN / variant, tmp_path / "adapter", "float32", 2, 2, "all-linear")
    ours = set(json.loads((adapter / "adapter_config.json").read_text())["target_modules"])
    assert ours == linear_modules(read_model(GOLDEN / variant, torch.float32))


def test_peft_still_refuses_what_all_linear_leaves_out_for_its_sake():
    with pytest.raises(ValueError, match="out_proj.*incompatible"):
        get_peft_model(read_model(GOLDEN / "mamba2", torch.float32), LoraConfig(r=2, target_modules=["out_proj"]))
    model = get_peft_model(read_model(GOLDEN / "qwen3_next", torch.float32),
                           LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]))
    assert "gate_up_proj" in model.peft_config["default"].target_parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_weights_are_those_of_merge_and_unload(variant, tmp_path):
    model = peft_model(variant, torch.float64)
    model.save_pretrained(tmp_path / "adapter")
    wanted = model.merge_and_unload().state_dict()
    merged = tool("merge", GOLDEN / variant, tmp_path / "merged", "float64", tmp_path / "adapter")
    ours = read_model(merged, torch.float64).state_dict()
    base = read_model(GOLDEN / variant, torch.float64).state_dict()
    assert ours.keys() == wanted.keys()
    changed = 0
    for name, value in wanted.items():
        # Of the sum and of a product over r = 3 five roundings of 1e-16 are left. One weight stays float32 in transformers' class.
        assert torch.allclose(ours[name].double(), value.double(), rtol=1e-14, atol=1e-15), name
        changed += not torch.equal(value.double(), base[name].double())
    assert changed >= 2


def test_adapters_from_peft_go_on_as_ours(tmp_path):
    """Read and written again, an adapter has the bits that PEFT gave it."""
    peft_model("llama", torch.float32).save_pretrained(tmp_path / "theirs")
    ours = tool("adapter", GOLDEN / "llama", tmp_path / "ours", "float32", tmp_path / "theirs")
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "theirs", ours))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "theirs", ours)]
    for key in ("peft_type", "task_type", "r", "lora_alpha", "bias", "fan_in_fan_out"):
        assert configs[0][key] == configs[1][key], key
    assert sorted(configs[0]["target_modules"]) == sorted(configs[1]["target_modules"])


def test_every_verb_takes_adapters(tmp_path):
    folder = GOLDEN / "qwen3_next"
    rollouts = write_lines(tmp_path / "r.jsonl", group())
    lora = ("--set", "lora.r=2", "--set", "lora.target_modules=[in_proj_qkvz, q_proj, v_proj]", "--set", "model.dtype=float64")
    for arm in ARMS:
        done = gradients(arm, folder, rollouts, tmp_path / f"{arm}.h5", *lora, "--set", "longstraw.tail_tokens=4")
        assert done.status == WITHIN, done
        names = recorded(tmp_path / f"{arm}.h5")[0].keys()
        assert names and all(".lora_" in name for name in names)
    done = run("verify", "--out", tmp_path / "out", "--set", f"model.path={folder}", "--set", f"data.rollouts={rollouts}", *lora)
    assert done.status == WITHIN, done


@pytest.mark.parametrize("setting, names", [
    (("lora.r=2", "lora.lora_dropout=0.1"), ("lora.lora_dropout", "0")),
    (("lora.r=2", "lora.target_modules=[q_prj]"), ("lora.target_modules", "q_prj", "q_proj")),
    (("lora.r=-1",), ("lora.r",)),
    (("lora.adapter=/nowhere",), ("/nowhere/adapter_config.json",)),
])
def test_wrong_settings_are_refused_by_name(setting, names, model, rollouts, tmp_path):
    sets = [word for value in setting for word in ("--set", value)]
    refused("gradients", "--arm", "exact", "--out", tmp_path / "r.h5", "--set", f"model.path={model}", "--set",
            f"data.rollouts={rollouts}", *sets, names=names)
