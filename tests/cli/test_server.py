"""longstraw train with responses from a server: one that samples with transformers, and ones that fail."""
import json
import math
import os
import subprocess
import sys

import pytest

from conftest import FAILED, ROOT, UNUSABLE, WITHIN, run, write_lines

REWARDS = '''
def low(prompts, completions, completion_ids, **columns):
    return [sum(i < 128 for i in ids) / len(ids) for ids in completion_ids]
'''


# By which old and sampled log-probs of a response of 4 tokens may differ in float32 under the same weights: 1e-5, to which golden
# values are held, of log-probs around ln 256.
ROUNDING = 1e-5 * 4 * math.log(256)


def ratios_of(metrics):
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    name = "sampling/importance_sampling_ratio/max"
    return [line[name] for line in lines if name in line]


class Server:
    def __init__(self, model):
        program = ROOT / "tests/training/sampling_server.py"
        python = os.environ.get("LONGSTRAW_PYTHON", sys.executable)
        self.process = subprocess.Popen([python, program, model, "float32"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self.ask('port')}"

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def one_server(wide_model):
    server = Server(wide_model)
    yield server
    server.process.communicate()


@pytest.fixture
def serve(one_server):
    def start(way=""):
        one_server.ask(f"reset {way}")
        return one_server

    return start


@pytest.fixture
def train(wide_model, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt_id": f"p{n}", "prompt_ids": list(range(2 + n, 12 + n))} for n in range(4)])

    def start(server, steps=2, **settings):
        chosen = {"data.prompts": prompts, "data.reward": f"{tmp_path / 'rewards.py'}:low", "rollout.num_generations": 3,
                  "rollout.max_completion_length": 4, "rollout.server.url": server.url, "rollout.server.retries": 1, "train.max_steps": steps,
                  "train.output_dir": tmp_path / "run", "model.path": wide_model, "optim.learning_rate": 1e-2, **settings}
        more = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
        return run("train", *more, env={**os.environ, "NO_PROXY": "127.0.0.1"})

    return start


def test_every_step_trains_on_what_the_server_samples_with_the_newest_weights(serve, train, tmp_path):
    server = serve()
    done = train(server, steps=3)
    assert done.status == WITHIN, done
    asked = server.ask("asked")
    assert [request["path"] for request in asked] == ["/update_weights_from_disk", "/v1/completions"] * 3 + ["/update_weights_from_disk"]
    assert len({request["seed"] for request in asked if "seed" in request}) == 3
    folders = [os.path.basename(request["model_path"]) for request in asked if "model_path" in request]
    assert folders == ["step-0", "step-1", "step-2", "step-3"]
    assert sorted(path.name for path in (tmp_path / "run/server_weights").iterdir()) == ["step-2", "step-3"]
    ratios = ratios_of(tmp_path / "run/metrics.jsonl")
    assert len(ratios) == 3 and all(abs(ratio - 1) < ROUNDING for ratio in ratios), ratios


def test_a_server_that_is_not_told_of_new_weights_shows_in_the_ratios(serve, train, tmp_path):
    server = serve()
    assert train(server, steps=3, **{"rollout.server.reload_path": "''"}).status == WITHIN
    assert [request["path"] for request in server.ask("asked")] == ["/v1/completions"] * 3
    first, *others = ratios_of(tmp_path / "run/metrics.jsonl")
    assert abs(first - 1) < ROUNDING and all(abs(ratio - 1) > 10 * ROUNDING for ratio in others)
    assert (tmp_path / "run/server_weights/step-3/model.safetensors").is_file()


def test_a_server_that_dies_midway_stops_the_run_and_the_next_goes_on(serve, train, tmp_path):
    done = train(serve("dies after two requests"), **{"train.save_steps": 1}, steps=3)
    assert done.status == FAILED, done
    for words in ("POST /v1/completions with 10 prompt tokens, n 3, max_tokens 4", "can't be reached, or went away", "(asked 2 times)"):
        assert words in done.err, done
    assert "asking again in" in done.err, done
    assert (tmp_path / "run/checkpoint-2").is_dir()
    done = train(serve(), **{"train.save_steps": 1}, steps=3)
    assert done.status == WITHIN and (tmp_path / "run/checkpoint-3").is_dir(), done
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 3


@pytest.mark.parametrize("way, status, words", [
    ("slow", FAILED, ["gave no answer within 1 s", "(asked 2 times)"]),
    ("rubbish", FAILED, ['answered with "Hello", wanted choices', "(asked 2 times)"]),
    ("another model", FAILED, ["sampled token 1000000", "another model"]),
    ("no ids", UNUSABLE, ["returns no token ids", "can't be tokenized back exactly"]),
])
def test_what_a_server_does_wrong_is_reported(serve, train, way, status, words):
    timeout = {"rollout.server.timeout": 1} if way == "slow" else {}
    done = train(serve(way), **timeout)
    assert done.status == status, done
    for word in words:
        assert word in done.err, done


def test_an_address_that_is_none_is_refused(train):
    done = train(type("Nowhere", (), {"url": "localhost:8000"}))
    assert done.status == UNUSABLE and "rollout.server.url" in done.err, done
