"""longstraw prepare: what tests/python/test_prepare.py tests, as a user meets it."""
import json
import os
import signal
import subprocess
import time

import pytest

from conftest import FAILED, ROOT, WITHIN, command, leftovers, refused, run, write_lines

WORDS = ROOT / "tests/data/tokenizer"
ROWS = [{"prompt": "what is two plus two ?", "answer": 4}, {"prompt_id": "chat", "prompt": [{"role": "user", "content": "what is"}]}]


@pytest.fixture
def data(tmp_path):
    return write_lines(tmp_path / "p.jsonl", ROWS)


def test_a_data_set_becomes_rows_with_token_ids(data, tmp_path):
    out = tmp_path / "out.jsonl"
    done = run("prepare", data, "--model", WORDS, "--out", out)
    assert done.status == WITHIN and done.out == f"{out}: 2 prompts; tokens min 4, mean 5.5, max 7\n", done
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"prompt_id": "1", "prompt_ids": [1, 5, 6, 7, 8, 7, 9], **ROWS[0]}, {"prompt_ids": [3, 5, 6, 4], **ROWS[1]}]
    assert leftovers(tmp_path, "p.jsonl", "out.jsonl") == []


def test_parquet_and_all_options(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["what is two plus two ?", "what"], "answer": ["a", "b"]}), tmp_path / "--p.parquet")
    done = run("prepare", "--model", WORDS, "--out", tmp_path / "out.jsonl", "--max-prompt-length", 4, "--long-prompt", "left_truncate",
               "--chat-template-kwargs", '{"x": 1}', "--num-proc", 1, "--", "--p.parquet", cwd=tmp_path)
    assert done.status == WITHIN and "1 truncated, longer than 4" in done.out, done
    assert [json.loads(line)["prompt_ids"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [[7, 8, 7, 9], [1, 5]]


def test_prepared_prompts_are_what_generate_reads(data, model, tmp_path):
    run("prepare", data, "--model", WORDS, "--out", tmp_path / "out.jsonl")
    done = run("generate", "--model", model, "--prompts", tmp_path / "out.jsonl", "--out", tmp_path / "r.jsonl", "--set", "rollout.num_generations=1",
               "--set", "rollout.max_completion_length=2")
    assert done.status == WITHIN, done
    assert [json.loads(line)["prompt_ids"] for line in (tmp_path / "r.jsonl").read_text().splitlines()] == [[1, 5, 6, 7, 8, 7, 9], [3, 5, 6, 4]]


def test_faults_are_named_and_nothing_is_left(data, tmp_path):
    out = tmp_path / "out.jsonl"
    refused("prepare", data, "--model", WORDS, "--out", out, "--max-prompt-length", 4, names=["p.jsonl:1", "7 tokens", "at most 4"])
    refused("prepare", data, "--out", out, names=["p.jsonl:1", "no checkpoint with a tokenizer"])
    refused("prepare", tmp_path / "none.parquet", "--model", WORDS, "--out", out, names=["none.parquet", "No such file"])
    refused("prepare", data, "--model", WORDS, "--out", out, "--chat-template-kwargs", "[1]", names=["[1]", "JSON object"])
    refused("prepare", data, "--model", WORDS, "--out", tmp_path / "none" / "out", names=["none/out", "No such file"], status=(FAILED,))
    refused("prepare", data, "--model", WORDS, names=["--out"])
    refused("prepare", data, "--out", out, "--long-prompt", "cut", names=["--long-prompt", "left_truncate"])
    refused("prepare", data, "--out", out, names=["/no/such/python"], status=(FAILED,), env={**os.environ, "LONGSTRAW_PYTHON": "/no/such/python"})
    assert leftovers(tmp_path, "p.jsonl") == []


def test_an_interrupt_leaves_nothing(tmp_path):
    data = write_lines(tmp_path / "p.jsonl", [{"prompt_ids": [n]} for n in range(10)])
    os.mkfifo(tmp_path / "endless.jsonl")
    process = subprocess.Popen(command("prepare", tmp_path / "endless.jsonl", "--out", tmp_path / "out.jsonl"), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    with open(tmp_path / "endless.jsonl", "w", encoding="utf-8") as pipe:  # opens when the program has come to read it
        pipe.write(data.read_text())
        pipe.flush()
        deadline = time.monotonic() + 60
        while not leftovers(tmp_path, "p.jsonl", "endless.jsonl") and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == FAILED and "stopped; nothing was written" in said, said
    assert leftovers(tmp_path, "p.jsonl", "endless.jsonl") == []
