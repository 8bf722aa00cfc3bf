"""The committed fixtures are what their scripts make, and the scripts' comparison sees a change."""
import hashlib
import json
import shutil

import make_golden
import pytest
from conftest import ROOT
from safetensors.torch import load_file, save_file

MANIFEST = json.loads((ROOT / "fixtures/manifest.json").read_text())


def test_the_manifest_names_every_file_with_its_hash():
    found = {}
    for folder in sorted((ROOT / "fixtures/golden").iterdir()):
        found[folder.name] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    assert found == {name: entry["sha256"] for name, entry in MANIFEST["variants"].items()}
    assert found.keys() == make_golden.VARIANTS.keys()


@pytest.mark.parametrize("name", ["llama_bias", "qwen2_mixed_sw", "llama_sharded"])
def test_a_variant_is_made_again_as_committed(tmp_path, name):
    make_golden.make_variant(name, tmp_path / name)
    assert make_golden.same_files(name, tmp_path / name, ROOT / "fixtures/golden" / name) == []


def test_a_changed_gradient_is_seen_and_named(tmp_path):
    name = "qwen3"
    shutil.copytree(ROOT / "fixtures/golden" / name, tmp_path / name)
    path = tmp_path / name / "golden_f64.safetensors"
    tensors = load_file(path)
    tensors["tail.5.grad.model.norm.weight"][3] += 1e-9
    save_file(tensors, path)
    faults = make_golden.same_files(name, tmp_path / name, ROOT / "fixtures/golden" / name)
    assert len(faults) == 1 and faults[0].startswith(f"{name}/golden_f64.safetensors: tail.5 differs by")


def test_detaching_changes_every_full_variant_by_far_more_than_rounding():
    for name, entry in MANIFEST["variants"].items():
        if "detached" in entry["checks"].get("f64", {}):
            assert entry["checks"]["f64"]["detached"] > 0.1, name
