"""longstraw gradients: records of every arm, and what the comparator says of them."""
import h5py
import numpy
import pytest
from safetensors import safe_open

from conftest import ARMS, BEYOND, GOLDEN, WITHIN, gradients, group, response, run, write_lines

DTYPES = ("float64", "float32", "bfloat16")
VARIANTS = ("smollm2", "llama_sharded", "qwen2_mixed_sw", "mistral_sw", "qwen3_bfloat16")


def stored(record):
    with h5py.File(record) as file:
        return {name: data[...] for name, data in file["steps/000000/gradients"].items()}


def relative_l2(reference, candidate):
    a, b = stored(reference), stored(candidate)
    assert a.keys() == b.keys()
    difference = sum(numpy.sum((b[n].astype(float) - a[n].astype(float)) ** 2) for n in a)
    return (difference / sum(numpy.sum(a[n].astype(float) ** 2) for n in a)) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arm", ARMS)
def test_a_record_holds_what_the_contract_says(arm, dtype, model, rollouts, tmp_path):
    out = tmp_path / "record.h5"
    done = gradients(arm, model, rollouts, out, "--set", f"model.dtype={dtype}", "--set", "longstraw.segment_tokens=8")
    assert done.status == WITHIN and done.out.strip() == str(out), done
    with safe_open(model / "model.safetensors", "numpy") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}
    values = stored(out)
    assert {name: value.shape for name, value in values.items()} == shapes
    wanted = "float64" if dtype == "float64" else "float32"
    assert all(value.dtype == wanted and numpy.isfinite(value).all() for value in values.values())
    assert all(numpy.any(value) for value in values.values())
    with h5py.File(out) as file:
        header = {name: value.decode() if isinstance(value, bytes) else value for name, value in file.attrs.items()}
        assert header["format"] == "longstraw-record" and header["arm"] == arm and header["dtype"] == dtype
        assert header["device"] == "cpu" and header["closed"] == 1 and header["seed"] == 0 and header["deterministic"] == 1
        assert len(header["model_sha256"]) == len(header["data_sha256"]) == 64
        assert len(header["git_commit"]) == 40 or header["git_commit"] == "unknown"
        assert header["torch_version"].startswith("2.")
        assert "segment_tokens: 8" in header["config"]
        step = file["steps/000000"]
        assert step["memory"].attrs["peak_bytes"] > 0 and step["timing"].attrs["total"] > 0
        phases = {"forward", "backward"} if arm == "reference" else {"capture", "replay", "sweep"}
        assert phases <= set(step["timing"].attrs)
        assert numpy.isfinite(step["objective"].attrs["loss"])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ("float64", "float32"))
def test_exact_agrees_with_the_reference_and_each_cut_with_its_own(variant, dtype, tmp_path):
    folder = GOLDEN / variant
    rollouts = write_lines(tmp_path / "r.jsonl", group() + group(prompt_id="q", prompt_tokens=6, lengths=(3, 3), seed=5))
    more = ("--set", f"model.dtype={dtype}", "--set", "longstraw.segment_tokens=5", "--set", "longstraw.tail_tokens=5")
    for arm in ARMS:
        assert gradients(arm, folder, rollouts, tmp_path / f"{arm}.h5", *more).status == WITHIN
    for cut in ("detached", "tail"):
        assert gradients("reference", folder, rollouts, tmp_path / f"cut_{cut}.h5", *more, "--reference-cut", cut).status == WITHIN
    noise = ()
    if dtype == "float32":
        assert gradients("reference", folder, rollouts, tmp_path / "noise.h5", *more, "--set", "model.dtype=float64").status == WITHIN
        noise = ("--noise", tmp_path / "noise.h5")

    def compared(a, b, *arguments):
        return run("compare", tmp_path / a, tmp_path / b, *arguments)

    assert compared("reference.h5", "exact.h5", *noise).status == WITHIN
    assert compared("cut_detached.h5", "detached.h5").status == WITHIN
    assert compared("cut_tail.h5", "tail.h5").status == WITHIN
    # The negative controls: the comparator is not content with just anything.
    assert compared("reference.h5", "detached.h5", *noise).status == BEYOND
    assert compared("exact.h5", "tail.h5").status == BEYOND
    report = compared("reference.h5", "detached.h5", "--json")
    assert report.status == BEYOND and report.json["verdict"] == "fail"
    if dtype == "float64":
        assert relative_l2(tmp_path / "reference.h5", tmp_path / "exact.h5") <= 1e-12
        assert relative_l2(tmp_path / "cut_detached.h5", tmp_path / "detached.h5") <= 1e-12
    assert relative_l2(tmp_path / "reference.h5", tmp_path / "detached.h5") > 1e-2


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_repeats_bit_for_bit(arm, model, rollouts, tmp_path):
    for name in ("a.h5", "b.h5"):
        assert gradients(arm, model, rollouts, tmp_path / name).status == WITHIN
    first, second = stored(tmp_path / "a.h5"), stored(tmp_path / "b.h5")
    assert all(numpy.array_equal(first[name], second[name]) for name in first)


def test_bounds_of_the_configuration_reach_the_comparator(model, rollouts, tmp_path):
    for arm in ("reference", "detached"):
        gradients(arm, model, rollouts, tmp_path / f"{arm}.h5")
    pair = (tmp_path / "reference.h5", tmp_path / "detached.h5")
    generous = ("--set", "compare.whole_bound=10", "--set", "compare.parameter_bound=10")
    assert run("compare", *pair).status == BEYOND
    assert run("compare", *pair, *generous).status == WITHIN
    assert run("compare", *pair, *generous, "--whole-bound", "1e-9").status == BEYOND


def test_a_prompt_of_one_token_is_valid_and_leaves_nothing_to_detach(model, tmp_path):
    rollouts = write_lines(tmp_path / "r.jsonl", group(prompt_tokens=1))
    for arm in ARMS:
        assert gradients(arm, model, rollouts, tmp_path / f"{arm}.h5", "--set", "model.dtype=float64").status == WITHIN
    for arm in ARMS[1:]:
        assert relative_l2(tmp_path / "reference.h5", tmp_path / f"{arm}.h5") <= 1e-12


def test_equal_rewards_give_a_gradient_of_zero_and_say_so(model, tmp_path):
    rollouts = write_lines(tmp_path / "r.jsonl", [response("p", [3, 4], [5, 6], reward=0.1) for _ in range(3)])
    done = gradients("exact", model, rollouts, tmp_path / "r.h5")
    assert done.status == WITHIN and "zero" in done.err, done
    assert not any(numpy.any(value) for value in stored(tmp_path / "r.h5").values())


def test_records_of_other_rollouts_or_models_are_not_compared(model, rollouts, tmp_path):
    others = write_lines(tmp_path / "others.jsonl", group(seed=1))
    gradients("exact", model, rollouts, tmp_path / "a.h5")
    gradients("exact", model, others, tmp_path / "b.h5")
    gradients("exact", GOLDEN / "llama", rollouts, tmp_path / "c.h5")
    done = run("compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert done.status == 2 and "data_sha256" in done.err, done
    done = run("compare", tmp_path / "a.h5", tmp_path / "c.h5")
    assert done.status == 2 and "model_sha256" in done.err, done


def test_a_planted_fault_is_caught(model, rollouts, tmp_path):
    gradients("reference", model, rollouts, tmp_path / "a.h5")
    gradients("exact", model, rollouts, tmp_path / "b.h5")
    assert run("compare", tmp_path / "a.h5", tmp_path / "b.h5").status == WITHIN
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        name = "model.layers.1.self_attn.v_proj.weight"
        file[f"steps/000000/gradients/{name}"][...] *= -1
    done = run("compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert done.status == BEYOND and name in done.out, done
