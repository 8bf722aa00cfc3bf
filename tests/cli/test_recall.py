"""examples/recall from end to end, a few steps of it: the same seeds in several ways, the verdicts, and the packed records."""
import json
import os
import pathlib
import subprocess
import sys

import h5py
import numpy as np
import pytest

from conftest import PROGRAM, ROOT, run

EXAMPLE = ROOT / "examples" / "recall"


def experiment(folder, *arguments):
    environment = dict(os.environ, LONGSTRAW_BUILD=str(pathlib.Path(PROGRAM).resolve().parents[1]))
    return subprocess.run([sys.executable, str(EXAMPLE / "run.py"), str(folder), *arguments], capture_output=True, text=True,
                          env=environment, timeout=600, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall")
    done = experiment(folder, "--tasks", "scratch", "--seeds", "0,1", "--ways", "reference,exact,detached,tail2", "--steps", "4")
    return folder, done


def rewards(path):
    with h5py.File(path) as record:
        table = record["rewards"]
        return {name: table[name][:] for name in ("step", "member", "reward", "length")} | {"split": table["split"].asstr()[:]}


def test_every_way_is_judged_against_the_reference(made):
    folder, done = made
    assert done.returncode in (0, 1), done.stderr
    verdicts = json.loads((folder / "verdicts.json").read_text())
    assert sorted(verdicts) == ["scratch/detached", "scratch/exact", "scratch/tail2"]
    for key, report in verdicts.items():
        assert report["measured"]["on"] == "eval" and report["paired"]
        assert report["a"]["seeds"] == report["b"]["seeds"] == [0, 1]
        assert f"{key.split('/')[1]}: " in done.stdout
    assert done.returncode == (0 if verdicts["scratch/exact"]["verdict"] == "equivalent" else 1)


def test_the_whole_gradient_earns_what_the_reference_earns_and_a_cut_one_something_else(made):
    folder, _ = made
    record = lambda way, seed: rewards(folder / "scratch" / f"{way}-{seed}" / "record.h5")
    for seed in (0, 1):
        reference, exact, detached = (record(way, seed) for way in ("reference", "exact", "detached"))
        assert (reference["split"] == "train").sum() == 4 * 32 * 16
        # The first step's answers come from the same weights and draws whatever the way.
        first = (reference["step"] == 1) & (reference["split"] == "train")
        for other in (exact, detached):
            np.testing.assert_array_equal(other["reward"][first], reference["reward"][first])
        # Four steps later rounding has moved a draw or none between the two whole gradients.
        assert np.mean(exact["reward"] != reference["reward"]) < 0.01
        assert not np.array_equal(detached["reward"], reference["reward"])


def test_runs_that_are_whole_are_not_run_again(made):
    folder, _ = made
    before = (folder / "scratch" / "exact-0" / "record.h5").stat().st_mtime_ns
    again = experiment(folder, "--tasks", "scratch", "--seeds", "0,1", "--ways", "reference,exact,detached,tail2", "--steps", "4")
    assert again.stderr.count("there already") == 8, again.stderr
    assert (folder / "scratch" / "exact-0" / "record.h5").stat().st_mtime_ns == before


def test_packed_records_give_the_same_verdict(made, tmp_path):
    folder, _ = made
    packed = {}
    for way in ("reference", "detached"):
        for seed in (0, 1):
            record, out = folder / "scratch" / f"{way}-{seed}" / "record.h5", tmp_path / way / f"{seed}.h5"
            subprocess.run([sys.executable, str(EXAMPLE / "pack.py"), str(out), str(record), "--root", str(folder)], check=True,
                           stdout=subprocess.DEVNULL)
            packed.setdefault(way, []).append(out)
            with h5py.File(out) as small:
                assert str(folder) not in small.attrs["config"].split("reward:")[0]
            assert out.stat().st_size < record.stat().st_size / 3
    small = run("rewards", "--json", "--a", *packed["reference"], "--b", *packed["detached"]).json
    large = json.loads((folder / "verdicts.json").read_text())["scratch/detached"]
    for key in ("verdict", "difference", "tests", "margin", "kolmogorov_smirnov", "more_seeds"):
        assert small[key] == large[key], key
    assert small["curves"]["eval"][-1] == large["curves"]["eval"][-1]


def test_a_way_that_is_not_known_is_named(tmp_path):
    done = experiment(tmp_path, "--ways", "reference,exakt")
    assert done.returncode == 2 and "exakt" in done.stderr and "detached" in done.stderr
