"""Outputs that can't be written, and what stood there before."""
import os
import resource

import pytest

from conftest import FAILED, UNUSABLE, WITHIN, command, gradients, group, leftovers, refused, run, write_lines


@pytest.fixture
def arguments(model, rollouts):
    return ("gradients", "--arm", "exact", "--model", model, "--rollouts", rollouts)


def test_a_folder_that_is_not_there_is_found_before_the_work(arguments, tmp_path):
    done = refused(*arguments, "--out", tmp_path / "no" / "r.h5", names=[tmp_path / "no"], status=(FAILED,))
    assert "reading" not in done.err


def test_a_file_in_the_place_of_the_folder(arguments, rollouts):
    refused(*arguments, "--out", rollouts / "r.h5", names=["r.h5"], status=(FAILED,))


def test_a_folder_in_the_place_of_the_record(arguments, tmp_path):
    refused(*arguments, "--out", tmp_path, names=[tmp_path], status=(UNUSABLE, FAILED))


def test_a_folder_without_permission(arguments, tmp_path):
    place = tmp_path / "closed"
    place.mkdir()
    place.chmod(0o500)
    if os.access(place, os.W_OK):
        # Root may write anywhere; but not where the kernel has no files to make.
        place = "/proc/self"
    refused(*arguments, "--out", f"{place}/r.h5", names=["r.h5"], status=(FAILED,))
    refused("verify", "--set", f"model.path={arguments[4]}", "--set", f"data.rollouts={arguments[6]}", "--out", f"{place}/out",
            names=["out"], status=(FAILED,))


def test_a_file_that_is_no_record_is_not_overwritten(arguments, tmp_path):
    precious = tmp_path / "precious.jsonl"
    precious.write_text("precious\n")
    refused(*arguments, "--out", precious, names=["precious.jsonl", "not overwritten"])
    assert precious.read_text() == "precious\n"


def test_an_older_record_is_replaced(arguments, tmp_path):
    out = tmp_path / "r.h5"
    run(*arguments, "--out", out)
    assert run(*arguments, "--out", out, "--set", "model.dtype=float64").status == WITHIN
    assert run("inspect", out, "--json").json["header"]["dtype"] == "float64"
    assert leftovers(tmp_path, "rollouts.jsonl", "r.h5") == []


def full_disk(limit):
    """In the child: no file may grow beyond `limit` bytes. What a full disk does to a write, but on any file system."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("limit", (0, 4096, 20000))
def test_a_full_disk_leaves_the_older_record(limit, arguments, tmp_path):
    out = tmp_path / "r.h5"
    run(*arguments, "--out", out)
    before = out.read_bytes()
    assert len(before) > 20000
    done = run(*arguments, "--out", out, "--set", "model.dtype=float64", preexec_fn=full_disk(limit))
    assert done.status == FAILED and "r.h5" in done.err, done
    assert out.read_bytes() == before
    assert run("inspect", out).status == WITHIN


@pytest.mark.parametrize("limit", (0, 4096, 20000))
def test_a_full_disk_leaves_nothing_that_reads_as_a_record(limit, arguments, tmp_path):
    done = run(*arguments, "--out", tmp_path / "r.h5", preexec_fn=full_disk(limit))
    assert done.status == FAILED and "r.h5" in done.err, done
    assert not (tmp_path / "r.h5").exists()


def test_a_full_disk_during_verify_leaves_no_report(model, rollouts, tmp_path):
    verify = ("verify", "--set", f"model.path={model}", "--set", f"data.rollouts={rollouts}", "--out", tmp_path / "out")
    assert run(*verify).status == WITHIN
    done = run(*verify, preexec_fn=full_disk(20000))
    assert done.status == FAILED and "reference.h5" in done.err, done
    # What is there of the first run is whole; a report of the first run next to records of another would not be.
    assert run("inspect", tmp_path / "out" / "exact.h5").status == WITHIN
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_full_disk_during_generate_leaves_the_older_file(model, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt_id": "a", "prompt_ids": [2, 3, 4]}])
    out = tmp_path / "o.jsonl"
    out.write_text("before\n")
    generate = ("generate", "--model", model, "--prompts", prompts, "--out", out)
    done = run(*generate, preexec_fn=full_disk(100))
    assert done.status == FAILED and "o.jsonl" in done.err, done
    assert out.read_text() == "before\n" and leftovers(tmp_path, "p.jsonl", "o.jsonl") == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("arguments", [("inspect", "{rollouts}"), ("verify", "--print-config")])
def test_standard_output_on_a_full_disk_is_a_failure(arguments, rollouts):
    import subprocess
    with open("/dev/full", "w") as full:
        done = subprocess.run(command(*[a.format(rollouts=rollouts) for a in arguments]), stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=60, check=False)
    assert done.returncode == FAILED and "standard output" in done.stderr


def test_no_output_of_a_refused_run(model, tmp_path):
    rows = group()
    rows[0]["completion_ids"] = []
    bad = write_lines(tmp_path / "bad.jsonl", rows)
    assert gradients("exact", model, bad, tmp_path / "r.h5").status == UNUSABLE
    assert leftovers(tmp_path, "bad.jsonl") == []
