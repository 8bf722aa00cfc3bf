"""Faults planted in real tiny models are caught and named by the comparator from the gradients alone."""
import json
import os
import pathlib
import subprocess

import hf_oracle as oracle
import planted_faults
import pytest
import torch
from conftest import ROOT

COMPARE = pathlib.Path(os.environ.get("LONGSTRAW_COMPARE", ROOT / "build/release/bin/longstraw-compare"))
pytestmark = pytest.mark.skipif(not COMPARE.exists(), reason=f"{COMPARE} is not built; ./run build, or name it in LONGSTRAW_COMPARE")

RECURRENT = ["qwen3_next", "qwen3_5", "mamba2", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid"]
LATENT = ["deepseek_v3", "glm_moe_dsa"]


@pytest.fixture(scope="module", autouse=True)
def float64():
    with oracle.precision(torch.float64):
        yield


@pytest.fixture(scope="module")
def case_of():
    cases = {}

    def get(variant):
        if variant not in cases:
            case = planted_faults.Case(variant)
            cases[variant] = case, *case.whole()
        return cases[variant]
    return get


def names(case_of, folder, variant, fault, arm="exact"):
    """What the comparator calls the gradient that `fault(case)` makes, and its exit status."""
    case, whole, logprobs = case_of(variant)
    b = case.write(folder / "reference.h5", "reference", whole, logprobs)
    a = case.write(folder / f"{arm}.h5", arm, fault(case), logprobs)
    done = subprocess.run([COMPARE, b, a, "--json"], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"] == "pass") == (done.returncode == 0)
    return done.returncode, [finding["name"] for finding in report["steps"][0]["findings"]]


FORWARD = [("deepseek_v32", "top-k in halves", "wrong_key_selection"), ("glm_moe_dsa", "top-k in halves", "wrong_key_selection"),
           ("deepseek_v3", "bias in routing weights", "wrong_routing_weights"),
           ("glm4_moe", "bias in routing weights", "wrong_routing_weights"),
           ("qwen3_next", "decay after the step", "wrong_delta_rule"), ("qwen3_5", "decay after the step", "wrong_delta_rule")]


@pytest.mark.parametrize("variant, fault, name", FORWARD)
def test_a_wrong_forward_pass_is_named_by_its_trace(tmp_path, variant, fault, name):
    right, wrong = planted_faults.Case(variant), planted_faults.plant(planted_faults.Case(variant), fault)
    for traced, expected in ((True, name), (False, "different_forward")):
        paths = [case.write(tmp_path / f"{arm}.h5", arm, *case.whole(), case.trace() if traced else None)
                 for arm, case in (("reference", right), ("exact", wrong))]
        done = subprocess.run([COMPARE, *paths, "--json"], capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        assert [finding["name"] for finding in json.loads(done.stdout)["steps"][0]["findings"]] == [expected]


@pytest.mark.parametrize("variant", RECURRENT + LATENT + ["glm4_moe", "qwen3_5_moe"])
def test_no_fault_has_no_name(case_of, tmp_path, variant):
    assert names(case_of, tmp_path, variant, lambda case: case.without_adjoint()) == (0, [])


@pytest.mark.parametrize("variant", RECURRENT + LATENT + ["glm4_moe"])
@pytest.mark.parametrize("arm", ["detached", "exact"])
def test_a_cut_prompt(case_of, tmp_path, variant, arm):
    # Also where the arm says that nothing is cut.
    cut = lambda case: oracle.detached(*case.group)[0]
    assert names(case_of, tmp_path, variant, cut, arm) == (1, ["detached_prompt"])


@pytest.mark.parametrize("variant", RECURRENT)
@pytest.mark.parametrize("part, name", [("convolution", "missing_convolution_adjoint"), ("recurrent", "dropped_recurrent_adjoint")])
def test_a_lost_adjoint_of_a_recurrent_mixer(case_of, tmp_path, variant, part, name):
    assert names(case_of, tmp_path, variant, lambda case: case.without_adjoint(part)) == (1, [name])


@pytest.mark.parametrize("variant", LATENT)
@pytest.mark.parametrize("part, name", [("latent", "dropped_latent_adjoint"), ("rotary_key", "dropped_rotary_key_adjoint")])
def test_a_lost_adjoint_of_latent_attention(case_of, tmp_path, variant, part, name):
    assert names(case_of, tmp_path, variant, lambda case: case.without_adjoint(part)) == (1, [name])


@pytest.mark.parametrize("variant", LATENT)
def test_an_expansion_without_the_gradient_of_prompt_positions(case_of, tmp_path, variant):
    fault = lambda case: case.without_expansion_gradient()
    assert names(case_of, tmp_path, variant, fault) == (1, ["missing_latent_expansion_gradient"])


@pytest.mark.parametrize("variant", ["llama", "qwen3_5", "glm4_moe"])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_lost_adjoint_of_keys_or_values(case_of, tmp_path, variant, part):
    assert names(case_of, tmp_path, variant, lambda case: case.without_adjoint(part)) == (1, [f"dropped_{part}_adjoint"])


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe", "glm_moe_dsa", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_other_routes_at_recompute(case_of, tmp_path, variant, share):
    assert names(case_of, tmp_path, variant, lambda case: case.with_other_routes(share)) == (1, ["stale_route_at_recompute"])
