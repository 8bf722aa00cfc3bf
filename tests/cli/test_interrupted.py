"""Runs that are told to end, and runs that are killed: nothing they leave reads as whole."""
import json
import pathlib
import random
import signal
import subprocess
import time

import h5py
import pytest

from conftest import FAILED, WITHIN, Finished, command, group, run, write_lines

REWARDS = '''
import os, time
def slow(prompts, completions, completion_ids, **columns):
    open(os.environ["PID_FILE"], "w").write(str(os.getpid()))
    time.sleep(600)
'''


@pytest.fixture
def long_rollouts(tmp_path):
    """Work of many seconds even for a tiny model: 3,000 prompt tokens, and textbook attention over all of them."""
    return write_lines(tmp_path / "long.jsonl", group(prompt_tokens=3000, lengths=(40,) * 16))


def start(*arguments, **options):
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def read_until(process, word):
    """Reads standard error to the line that has `word`."""
    text = ""
    for line in process.stderr:
        text += line
        if word in line:
            return text
    raise AssertionError(f"{word!r} did not come\n{text}")


def end(process, timeout=20):
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Finished(subprocess.CompletedProcess([], process.returncode, out, err))


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
@pytest.mark.parametrize("arm", ("reference", "exact"))
def test_a_signal_ends_the_computation_at_once_without_a_record(arm, number, model, long_rollouts, tmp_path):
    process = start("gradients", "--arm", arm, "--model", model, "--rollouts", long_rollouts, "--out", tmp_path / "r.h5")
    read_until(process, "reading")  # the model is there, the arm is under way
    asked = time.monotonic()
    process.send_signal(number)
    done = end(process)
    assert done.status == FAILED and "interrupted" in done.err, done
    assert time.monotonic() - asked < 10
    assert not (tmp_path / "r.h5").exists()


def test_a_signal_during_verify_leaves_whole_records_only(model, long_rollouts, tmp_path):
    process = start("verify", "--set", f"model.path={model}", "--set", f"data.rollouts={long_rollouts}", "--out", tmp_path / "out",
                    "--set", "reference.attention=sdpa", "--set", "longstraw.segment_tokens=256")
    read_until(process, "detached")  # its line comes when it is done
    process.send_signal(signal.SIGINT)
    done = end(process)
    assert done.status == FAILED, done
    assert not (tmp_path / "out" / "report.json").exists()
    assert run("inspect", tmp_path / "out" / "reference.h5", "--json").json["closed"] is True
    for name in ("detached", "tail", "exact"):
        path = tmp_path / "out" / f"{name}.h5"
        if path.exists():
            assert run("inspect", path, "--json").json["closed"] is True


def test_a_signal_ends_a_reward_function_that_hangs(model, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt_id": "a", "prompt_ids": [2, 3, 4]}])
    pid_file = tmp_path / "pid"
    process = start("generate", "--model", model, "--prompts", prompts, "--reward", f"{tmp_path / 'rewards.py'}:slow",
                    "--out", tmp_path / "o.jsonl", env={**__import__("os").environ, "PID_FILE": str(pid_file)})
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    worker = pathlib.Path("/proc") / pid_file.read_text()
    process.send_signal(signal.SIGINT)
    assert end(process).status == FAILED
    deadline = time.monotonic() + 20
    while worker.exists() and "zombie" not in (worker / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not worker.exists() or "zombie" in (worker / "status").read_text(), "the Python process outlives the program"
    assert not (tmp_path / "o.jsonl").exists()


def read_record(path):
    """What a record's reader makes of `path`: None when it refuses it with a message."""
    done = run("inspect", path, "--json")
    if done.status == 2:
        assert str(path) in done.err, done
        return None
    assert done.status == WITHIN, done
    return json.loads(done.out)


def test_a_run_killed_at_any_moment_leaves_no_half_record_that_reads_as_whole(model, rollouts, tmp_path):
    out = tmp_path / "r.h5"
    arguments = ("gradients", "--arm", "exact", "--model", model, "--rollouts", rollouts, "--out", out)
    begin = time.monotonic()
    assert run(*arguments).status == WITHIN
    usual = time.monotonic() - begin
    with h5py.File(out) as file:
        whole = {name: data[...] for name, data in file["steps/000000/gradients"].items()}
    out.unlink()
    chance = random.Random(0)
    killed = 0
    for _ in range(12):
        process = start(*arguments)
        # Most of a short run is starting; writing is at its end.
        time.sleep(usual * chance.uniform(0.5, 1.05))
        process.send_signal(signal.SIGKILL)
        status = end(process).status
        killed += status == -signal.SIGKILL
        if not out.exists():
            continue
        said = read_record(out)
        if said is not None and said["closed"]:
            with h5py.File(out) as file:
                found = file["steps/000000/gradients"]
                assert set(found) == set(whole) and all((found[name][...] == whole[name]).all() for name in whole)
        elif said is not None:
            done = run("compare", out, out)
            assert done.status == 2, "an interrupted record was compared as if it were whole"
        out.unlink()
    assert killed > 0
    assert run(*arguments).status == WITHIN  # what the dead left behind is in nobody's way
