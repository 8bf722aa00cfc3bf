"""longstraw generate."""
import json
import sys

import pytest

from conftest import FAILED, UNUSABLE, WITHIN, gradients, leftovers, refused, run, write_lines

REWARDS = '''
def first_id(prompts, completions, completion_ids, bonus, **columns):
    return [ids[0] + b for ids, b in zip(completion_ids, bonus)]

def some(prompts, completions, completion_ids, **columns):
    return [None] + [0.5] * (len(completion_ids) - 1)
'''


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt_id": f"p{n}", "prompt_ids": list(range(2, 12 + n)), "bonus": 100 * n} for n in range(3)]
    return write_lines(tmp_path / "prompts.jsonl", rows)


def generate(model, prompts, out, *more):
    return run("generate", "--model", model, "--prompts", prompts, "--out", out, "--set", "rollout.num_generations=3",
               "--set", "rollout.max_completion_length=5", *more)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rollouts_are_written_scored_and_usable(model, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    done = generate(model, prompts, out, "--reward", f"{tmp_path / 'rewards.py'}:first_id")
    assert done.status == WITHIN and done.out.strip() == str(out), done
    rows = rows_of(out)
    assert [row["prompt_id"] for row in rows] == ["p0"] * 3 + ["p1"] * 3 + ["p2"] * 3
    for row in rows:
        assert 1 <= len(row["completion_ids"]) <= 5 and all(0 <= i < 48 for i in row["completion_ids"])
        assert row["reward"] == row["completion_ids"][0] + 100 * int(row["prompt_id"][1])
        assert len(row["sampling_logprobs"]) == len(row["completion_ids"]) and max(row["sampling_logprobs"]) <= 0
        assert row["completion"] == ""  # these models have no tokenizer
    assert gradients("exact", model, out, tmp_path / "r.h5").status == WITHIN


def test_without_a_reward_nothing_is_scored(model, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    assert generate(model, prompts, out).status == WITHIN
    assert not any("reward" in row for row in rows_of(out))


def test_a_reward_function_may_have_no_opinion(model, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    assert generate(model, prompts, out, "--num-prompts", "1", "--reward", f"{tmp_path / 'rewards.py'}:some").status == WITHIN
    assert [row.get("reward") for row in rows_of(out)] == [None, 0.5, 0.5]


def test_several_functions_and_programs_are_added_with_their_weights(model, prompts, tmp_path):
    program = tmp_path / "short.py"
    program.write_text("import json, sys\nfor line in sys.stdin:\n    ids = json.loads(line)['completion_ids']\n"
                       "    print(json.dumps({'rewards': [-len(i) for i in ids]}), flush=True)\n")
    rewards = [f"{tmp_path / 'rewards.py'}:first_id", f"command:{sys.executable} {program}", f"{tmp_path / 'rewards.py'}:some"]
    assert generate(model, prompts, tmp_path / "out.jsonl", "--set", f"data.reward={json.dumps(rewards)}",
                    "--set", "objective.reward_weights=[1, 0.5, 2]").status == WITHIN
    for n, row in enumerate(rows_of(tmp_path / "out.jsonl")):
        first, short, some = row["reward_parts"]
        assert (short, some) == (-len(row["completion_ids"]), 0.5 if n % 3 else None)
        assert row["reward"] == first + 0.5 * short + 2 * (some or 0)
    assert gradients("exact", model, tmp_path / "out.jsonl", tmp_path / "r.h5").status == WITHIN


def test_weights_that_are_not_one_a_function_are_refused(model, prompts, tmp_path):
    refused("generate", "--model", model, "--prompts", prompts, "--out", tmp_path / "out.jsonl", "--reward",
            f"{tmp_path / 'rewards.py'}:first_id", "--set", "objective.reward_weights=[1, 2]", names=["objective.reward_weights", "got 2", "wanted 1"])


@pytest.mark.parametrize("errors, status", [("stop", FAILED), ("null", WITHIN)])
def test_a_reward_program_that_dies_stops_the_run_or_leaves_its_rewards_missing(model, prompts, tmp_path, errors, status):
    rewards = [f"{tmp_path / 'rewards.py'}:first_id", "command:sh -c 'read line; echo no more >&2; exit 4'"]
    done = generate(model, prompts, tmp_path / "out.jsonl", "--set", f"data.reward={json.dumps(rewards)}", "--set", f"data.reward_errors={errors}")
    assert done.status == status and "ended with exit status 4" in done.err and "no more" in done.err, done
    assert done.err.count("ended with exit status 4") == 1, done  # it fails for each of three prompts
    if status == WITHIN:
        assert all(row["reward_parts"] == [row["reward"], None] for row in rows_of(tmp_path / "out.jsonl"))
    else:
        assert not (tmp_path / "out.jsonl").exists()


def test_a_seed_repeats_and_another_differs_and_prompts_do_not_depend_on_each_other(model, prompts, tmp_path):
    names = {}
    for name, more in (("a", ()), ("b", ()), ("few", ("--num-prompts", "2")), ("other", ("--set", "rollout.seed=1"))):
        assert generate(model, prompts, tmp_path / name, *more).status == WITHIN
        names[name] = (tmp_path / name).read_text()
    assert names["a"] == names["b"] != names["other"]
    assert names["a"].splitlines()[:6] == names["few"].splitlines()


def test_a_stop_token_ends_a_response(model, prompts, tmp_path):
    everything = ",".join(map(str, range(48)))
    generate(model, prompts, tmp_path / "out", "--set", f"rollout.stop_token_ids=[{everything}]")
    assert {len(row["completion_ids"]) for row in rows_of(tmp_path / "out")} == {1}


def test_a_text_prompt_needs_a_tokenizer(model, tmp_path):
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt_id": "said", "prompt": "hello"}])
    refused("generate", "--model", model, "--prompts", prompts, "--out", tmp_path / "out.jsonl", names=["prompts.jsonl", "said", "tokenizer"])
    assert leftovers(tmp_path, "prompts.jsonl") == []


def test_prompt_ids_beyond_the_vocabulary_are_refused_with_their_place(model, tmp_path):
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt_id": "far", "prompt_ids": [1, 2, 48]}])
    done = generate(model, prompts, tmp_path / "out.jsonl")
    assert done.status == UNUSABLE and not (tmp_path / "out.jsonl").exists()
    for word in ("prompts.jsonl", "far", "48", "0 to 47"):
        assert word in done.err, done
