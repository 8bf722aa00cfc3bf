"""The committed fixtures are what their scripts make, and the scripts' comparison sees a change."""
import copy
import hashlib
import json
import math
import shutil

import golden_layouts
import hf_oracle
import make_golden
import make_objective_golden
import objective_cases
import pytest
import torch
import transformers
from conftest import ROOT
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

GOLDEN = ROOT / "fixtures/golden"
MANIFEST = json.loads((ROOT / "fixtures/manifest.json").read_text())


def test_the_manifest_names_every_file_with_its_hash():
    found = {}
    for folder in sorted(GOLDEN.iterdir()):
        found[folder.name] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    assert found == {name: entry["sha256"] for name, entry in MANIFEST["variants"].items()}
    assert found.keys() == make_golden.VARIANTS.keys()


@pytest.mark.parametrize("name", ["llama_bias", "qwen2_mixed_sw", "llama_sharded", "glm_moe_dsa", "falcon_h1_norm",
                                  "deepseek_v3_fp8", "qwen3_5_moe_multimodal"])
def test_a_variant_is_made_again_as_committed(tmp_path, name):
    make_golden.make_variant(name, tmp_path / name)
    assert make_golden.same_files(name, tmp_path / name, GOLDEN / name) == []


def test_a_changed_gradient_is_seen_and_named(tmp_path):
    name = "qwen3"
    shutil.copytree(GOLDEN / name, tmp_path / name)
    path = tmp_path / name / "golden_f64.safetensors"
    tensors = load_file(path)
    tensors["tail.5.grad.model.norm.weight"][3] += 1e-9
    save_file(tensors, path)
    faults = make_golden.same_files(name, tmp_path / name, GOLDEN / name)
    assert len(faults) == 1 and faults[0].startswith(f"{name}/golden_f64.safetensors: tail.5 differs by")


def test_detaching_changes_every_full_variant_by_far_more_than_rounding():
    for name, entry in MANIFEST["variants"].items():
        if "detached" in entry["checks"].get("f64", {}):
            assert entry["checks"]["f64"]["detached"] > 0.1, name


def test_stored_selections_are_complete_ascending_and_of_visible_keys():
    found = 0
    for folder in sorted(GOLDEN.iterdir()):
        tensors = load_file(folder / "golden_f64.safetensors")
        for name, rows in ((n, t) for n, t in tensors.items() if n.startswith(("route.", "dsa.topk."))):
            found += 1
            group, layer = name.split(".")[-2:]
            assert rows.shape[0] == len(tensors["input.prompt"]) + len(tensors[f"input.resp.{group}"])
            for position, row in enumerate(rows.tolist()):
                count = min(len(row), position + 1) if name.startswith("dsa.") else len(row)
                assert row[:count] == sorted(set(row[:count])) and row[0] >= 0, (folder.name, name, position)
                assert row[count:] == [-1] * (len(row) - count)
                assert not name.startswith("dsa.") or max(row) <= position
    assert found > 100
    for name, entry in MANIFEST["variants"].items():
        for checks in entry["checks"].values():
            assert all(gap >= make_golden.NEAR_TIE for key, gap in checks.items() if key.startswith("smallest_gap")), name


def float64_model(name):
    return make_golden.build(make_golden.VARIANTS[name]()).double()


def test_a_selection_that_rests_on_a_tie_is_refused():
    model = make_golden.build(make_golden.VARIANTS["glm4_moe_plain"]())
    with torch.no_grad():
        gate = model.model.layers[1].mlp.gate
        gate.weight[1:] = gate.weight[0]   # all experts alike, but for a bias that is now 0
        gate.e_score_correction_bias.zero_()
    with pytest.raises(AssertionError, match=r"rests on a difference of 0\.0e\+00"):
        make_golden.goldens(model, torch.float64, make_golden.VARIANTS["glm4_moe_plain"]())


def test_index_scores_that_are_equal_are_refused():
    model = hf_oracle.prepare(make_golden.build(make_golden.VARIANTS["deepseek_v32"]()))
    with torch.no_grad(), make_golden.Selections(model) as chosen:
        model.model.layers[0].self_attn.indexer.weights_proj.weight.zero_()   # every score is 0
        hf_oracle.run(model, torch.arange(4))   # fewer tokens than an indexer takes: none is left out for a tie
    assert chosen.ties == 6 and "index" not in chosen.gap   # 1 + 2 + 3 neighbours, of the rows that see 2, 3 and 4 keys
    with pytest.raises(AssertionError, match="6 pairs of equal index scores"):
        make_golden.selected(chosen)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_tied", "bamba", "falcon_h1", "nemotron_h_moe", "granitemoehybrid",
                                  "mamba2", "glm_moe_dsa"])
def test_rewritten_forward_passes_compute_what_transformers_decodes_token_by_token(name):
    with hf_oracle.precision(torch.float64), torch.no_grad():
        untouched, ids = float64_model(name), torch.arange(3, 20)
        untouched.config._experts_implementation = "eager"
        hf_oracle.recompute_rotary_tables(untouched)
        whole = hf_oracle.run(hf_oracle.prepare(copy.deepcopy(untouched)), ids)
        cache = transformers.DynamicCache(config=untouched.config)
        for position, token in enumerate(ids):
            logits = hf_oracle.run(untouched, token[None], cache, position)[0]
            # Some hundred roundings of float64, as between two machines.
            assert make_golden.relative([logits], [whole[position]]) <= make_golden.SAME["float64"], position


@pytest.mark.parametrize("name", ["qwen3_5_tied", "mamba2_tied", "falcon_h1", "deepseek_v32"])
def test_replay_leaves_the_prompt_state_as_it_is_and_any_pieces_give_the_full_gradient(name):
    variant = make_golden.VARIANTS[name]()
    with hf_oracle.precision(torch.float64):
        model = hf_oracle.prepare(float64_model(name))
        prompt, responses, weights = make_golden.make_data(model.config.vocab_size, variant.responses)
        weights = [w.double() for w in weights]
        with torch.no_grad():
            state = hf_oracle.extend(model, {}, 0, prompt[:-1])
            before = copy.deepcopy(state)
            hf_oracle.replay_group(model, prompt, responses, weights, state)
        assert state.keys() == before.keys() and all(torch.equal(state[k], before[k]) for k in state)
        full = hf_oracle.gradient(hf_oracle.full_group(model, prompt, responses, weights)[0], list(model.parameters()))
        for pieces in ([1] * 20, [2, 2, 3, 13]):
            found = hf_oracle.by_chunks(model, prompt, responses, weights, pieces)
            assert make_golden.relative(found, full) <= make_golden.SAME["float64"]


@pytest.mark.parametrize("dropped", ["convolution", "recurrent", "key"])
def test_an_adjoint_that_is_dropped_between_pieces_is_seen(monkeypatch, dropped):
    variant, get_state = make_golden.VARIANTS["falcon_h1"](), hf_oracle.get_state
    monkeypatch.setattr(hf_oracle, "get_state", lambda cache, latent: {
        name: tensor.detach() if name.endswith(dropped) else tensor for name, tensor in get_state(cache, latent).items()})
    with hf_oracle.precision(torch.float64):
        model = hf_oracle.prepare(float64_model("falcon_h1"))
        prompt, responses, weights = make_golden.make_data(model.config.vocab_size, variant.responses)
        weights = [w.double() for w in weights]
        full = hf_oracle.gradient(hf_oracle.full_group(model, prompt, responses, weights)[0], list(model.parameters()))
        found = hf_oracle.by_chunks(model, prompt, responses, weights, make_golden.CHUNKS)
    assert make_golden.relative(found, full) > 1e-3


def test_block_scaled_weights_mean_what_transformers_reads_and_are_near_the_weights_they_stand_for():
    folder, name = GOLDEN / "deepseek_v3_fp8", "deepseek_v3_fp8"
    stored = load_file(folder / "model.safetensors")
    _, plain = golden_layouts.dequantized({}, stored)
    exact = make_golden.build(make_golden.VARIANTS[name]()).state_dict()
    scaled = [k.removesuffix("_scale_inv") for k in stored if k.endswith("_scale_inv")]
    assert {tuple(stored[f"{k}_scale_inv"].shape) for k in scaled} == {(1, 1), (1, 2), (2, 1)}
    assert sum(key in exact for key in scaled) > 10
    for key in scaled:
        scale, weight = stored[f"{key}_scale_inv"], stored[key]
        assert weight.dtype == torch.float8_e4m3fn and plain[key].dtype == torch.float32
        assert torch.equal(plain[key].double(), weight.double() * golden_layouts.spread(scale, weight.shape).double())
        if scale.shape == (1, 1):   # `transformers` divides a weight into equal blocks, so that it reads no ragged ones
            assert torch.equal(plain[key], Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32))
        if key in exact:
            # Half a unit of 4 significant bits; below the smallest normal 2^-6 half of 2^-9; the largest of a block may be cut by
            # the rounding of its scale to 8 bits.
            bound = exact[key].abs() * (2**-4 + 2**-8) + golden_layouts.spread(scale, weight.shape) * 2**-10
            assert ((plain[key] - exact[key]).abs() <= bound).all(), key


OBJECTIVE = ROOT / "fixtures/objective"


def test_trls_objectives_are_made_again_as_committed_and_a_change_is_seen(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["make_objective_golden.py", "--check"])
    assert make_objective_golden.main() == 0, capsys.readouterr().out
    changed = json.loads((OBJECTIVE / "trl.json").read_text())
    changed["cases"][40]["grad_logprobs"][2][0] += 1e-9
    (tmp_path / "trl.json").write_text(json.dumps(changed))
    monkeypatch.setattr(make_objective_golden, "OUTPUT", tmp_path / "trl.json")
    assert make_objective_golden.main() == 1
    assert "/cases/40/grad_logprobs/2/0: " in capsys.readouterr().out


def test_objective_cases_say_what_they_are_for():
    """Each file names its versions; clipping, both signs and masks occur, so that a formula without them would be seen."""
    for path, key in ((OBJECTIVE / "trl.json", "trl"), (OBJECTIVE / "verl.json", "verl")):
        made = json.loads(path.read_text())
        assert made[key] and made["torch"] and (ROOT / made["made_by"]).exists()
        names = [case["name"] for case in made["cases"]]
        assert len(set(names)) == len(names) > 50
        for case in made["cases"]:
            signs = {advantage > 0 for advantage in case["advantages"] if advantage}
            assert signs == {True, False}, case["name"]
            assert {0, 1} == {m for row in case["mask"] for m in row}, case["name"]
            assert case["bound"] in (objective_cases.ROUNDING, 1e-7)
        clipped = [case for case in made["cases"] if case["name"].endswith("_clipped")]
        ratios = [math.exp(lp - lo) for case in clipped for a, b, m in zip(case["logprobs"], case["old_logprobs"], case["mask"])
                  for lp, lo, counts in zip(a, b, m) if counts]
        assert min(ratios) < 0.8 and max(ratios) > 1.2 and any(0.8 < r < 1.2 for r in ratios)
