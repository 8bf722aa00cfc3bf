"""longstraw rewards: two ways of training, several seeds each, in records of made-up runs; the verdict and the exit status."""
import json
import pathlib
import subprocess
import sys

import h5py
import pytest

from conftest import BEYOND, PROGRAM, ROOT, UNUSABLE, WITHIN, refused, run

sys.path.insert(0, str(ROOT / "tests" / "support"))
from reward_records import learning_run, write_run  # noqa: E402

SEEDS = range(1, 6)


@pytest.fixture
def side(tmp_path):
    def make(arm, reached, seeds=SEEDS, **options):
        return [learning_run(tmp_path / f"{arm}-{seed}.h5", arm, seed, reached, **options) for seed in seeds]

    return make


def test_equal_rewards_are_equivalent(side):
    done = run("rewards", *side("reference", 1.0), *side("exact", 1.0))
    assert done.status == WITHIN, done
    assert "verdict: equivalent: exact earns what reference does" in done.out
    assert "up to 45 % of seeds" in done.out   # five runs that agree are five runs


def test_rewards_that_fall_short_are_different_and_the_report_is_json(side, tmp_path):
    out = tmp_path / "report.json"
    done = run("rewards", "--a", *side("reference", 1.0), "--b", *side("detached", 0.35), "--json", "--out", out)
    assert done.status == BEYOND and done.out == "", done
    report = json.loads(out.read_text())
    assert report["format"] == "longstraw-rewards" and report["verdict"] == "different" and report["exit_status"] == BEYOND
    assert report["paired"] and report["a"]["seeds"] == list(SEEDS) and report["b"]["arm"] == "detached"
    assert report["measured"] == {"on": "eval", "first_step": 40, "last_step": 40}
    with h5py.File(report["b"]["records"][0]) as file:
        table = file["rewards"]
        last = (table["split"].asstr()[:] == "eval") & (table["step"][:] == 40)
        assert report["b"]["final"][0] == pytest.approx(table["reward"][:][last].mean(), abs=1e-12)
    assert report["difference"]["interval"][1] < -report["margin"]["reward"]
    assert [point["step"] for point in report["curves"]["eval"]] == [10, 20, 30, 40]


def test_a_way_that_learns_later_but_as_far_is_equivalent_and_the_whole_training_shows_it(side):
    done = run("rewards", *side("reference", 1.0), *side("detached", 1.0, half_way=0.7), "--json")
    assert done.status == WITHIN, done
    whole = done.json["whole_training"]
    assert whole["difference"] < -0.1 and whole["p_different"] < 0.01


def test_few_noisy_seeds_are_undecided_and_say_how_many_more(tmp_path):
    records = [write_run(tmp_path / f"{arm}-{seed}.h5", arm, seed, evals=[(1, [reward] * 4)])
               for arm, rewards in (("reference", (0.8, 0.9, 0.75)), ("exact", (0.85, 0.8, 0.81))) for seed, reward in enumerate(rewards)]
    done = run("rewards", *records, "--json")
    assert done.status == BEYOND and done.json["verdict"] == "undecided" and done.json["more_seeds"] > 0, done
    wide = run("rewards", *records, "--absolute-margin", "0.5")
    assert wide.status == WITHIN, wide


def test_one_seed_a_side_never_decides(side):
    done = run("rewards", *side("reference", 1.0, [1]), *side("detached", 0.2, [1]))
    assert done.status == BEYOND and "verdict: undecided: one run a side" in done.out, done


def test_the_order_of_the_records_does_not_matter_but_the_first_arm_is_a(side):
    a, b = side("reference", 1.0), side("detached", 0.35)
    first, mixed = run("rewards", *a, *b), run("rewards", a[0], *b[::-1], *a[:0:-1])
    assert first.out == mixed.out
    assert run("rewards", *b, *a, "--json").json["a"]["arm"] == "detached"


def test_the_comparators_program_says_the_same(side):
    records = [*side("reference", 1.0), *side("detached", 0.35)]
    program = pathlib.Path(PROGRAM).with_name("longstraw-compare")
    other = subprocess.run([program, "rewards", *records], capture_output=True, text=True, timeout=60, check=False)
    mine = run("rewards", *records)
    assert (other.returncode, other.stdout) == (mine.status, mine.out)


def test_an_interrupted_run_is_compared_on_request_up_to_where_it_came(side, tmp_path):
    a = side("reference", 1.0, [1, 2])
    b = side("exact", 1.0, [1])
    b.append(learning_run(tmp_path / "exact-2.h5", "exact", 2, 1.0, closed=False))
    refused("rewards", *a, *b, names=["exact-2.h5", "--partial"])
    done = run("rewards", *a, *b, "--partial")
    assert "interrupted runs" in done.out and done.status == WITHIN, done


def test_wrong_use_is_told(side, tmp_path):
    a, b, c = side("reference", 1.0, [1]), side("exact", 1.0, [1]), side("tail", 1.0, [1])
    refused("rewards", names=["no records"])
    refused("rewards", *a, names=["1 arm (reference)", "wanted two"])
    refused("rewards", *a, *b, *c, names=["3 arms (reference, exact, tail)", "--a and --b"])
    refused("rewards", "--a", *a, names=["--a and --b", "one is missing"])
    refused("rewards", *a, *b, "--margin", "0", names=["--margin", "got 0"])
    refused("rewards", *a, *b, "--margin", "five", names=["--margin", "five"])
    refused("rewards", *a, tmp_path / "none.h5", names=["none.h5"])
    other = learning_run(tmp_path / "other.h5", "exact", 1, 1.0, model="other weights")
    refused("rewards", *a, other, names=["model_sha256", "other weights"])
    twice = learning_run(tmp_path / "twice.h5", "exact", 1, 1.0)
    refused("rewards", *a, *b, twice, names=["seed 1", "twice.h5", "--a and --b"])
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(b[0].read_bytes()[:900])
    refused("rewards", *a, damaged, names=["damaged.h5"])


def test_help_names_the_options_and_the_status():
    done = run("rewards", "--help")
    assert done.status == WITHIN
    for word in ("--a ", "--b ", "--margin", "--absolute-margin", "--level", "--partial", "--step-from", "--json", "--out", "1 different or undecided"):
        assert word in done.out, word
