"""One model of each new kind of mixer, from a prompt to a verdict: hybrid with experts, sparse latent attention, Mamba-2."""
import json

import h5py
import pytest

from conftest import GOLDEN, WITHIN, run, write_lines

REWARDS = '''
def small_ids(prompts, completions, completion_ids, **columns):
    return [sum(ids) / len(ids) for ids in completion_ids]
'''


@pytest.mark.parametrize("variant", ["qwen3_5_moe", "glm_moe_dsa", "nemotron_h"])
def test_sampled_responses_are_judged_and_have_the_log_probs_of_training(variant, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt_id": "p", "prompt_ids": [(7 * i * i + 5 * i) % 20 + 2 for i in range(19)]}]
    prompts = write_lines(tmp_path / "prompts.jsonl", rows)
    sampling = ("--set", "rollout.num_generations=3", "--set", "rollout.max_completion_length=6", "--set", "rollout.stop_token_ids=[]",
                "--set", "model.dtype=float64", "--set", "longstraw.segment_tokens=4")
    rollouts = tmp_path / "rollouts.jsonl"
    done = run("generate", "--model", GOLDEN / variant, "--prompts", prompts, "--reward", f"{tmp_path / 'rewards.py'}:small_ids",
               "--out", rollouts, *sampling)
    assert done.status == WITHIN, done
    responses = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert [len(row["completion_ids"]) for row in responses] == [6, 6, 6]

    out = tmp_path / "out"
    done = run("verify", "--out", out, "--set", f"model.path={GOLDEN / variant}", "--set", f"data.rollouts={rollouts}",
               "--set", "longstraw.tail_tokens=4", *sampling)
    assert done.status == WITHIN, done
    report = json.loads((out / "report.json").read_text())
    distance = {arm: report["arms"][arm]["gradient"]["relative_l2"] for arm in ("detached", "tail", "exact")}
    assert distance["exact"] < 1e-12 and distance["detached"] > 0.05 and distance["tail"] > 1e-3, distance
    assert [report["arms"][arm]["verdict"] for arm in ("detached", "tail", "exact")] == ["fail", "fail", "pass"]

    with h5py.File(out / "exact.h5") as file:
        trained = file["steps/000000/responses/policy_logprobs"][:]
    sampled = [value for row in responses for value in row["sampling_logprobs"]]
    assert max(abs(trained - sampled)) < 1e-10
