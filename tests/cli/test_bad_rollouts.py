"""Rollouts that can't be used: refused with file, line, key and value; nothing is written."""
import json

import pytest

from conftest import group, leftovers, refused, response, write_lines


def spoilt(**columns):
    """Four good lines; the third has `columns`."""
    rows = group()
    rows[2].update(columns)
    return [json.dumps(row) for row in rows]


CASES = {
    "empty response": (spoilt(completion_ids=[]), ["rollouts.jsonl:3", "completion_ids"]),
    "empty prompt": ([json.dumps(response("p", [], [1], reward=r)) for r in (0, 1)], ["rollouts.jsonl:1", "prompt_ids"]),
    "response beyond the vocabulary": (spoilt(completion_ids=[1, 48]), ["rollouts.jsonl:3", "completion_ids", "48"]),
    "prompt beyond the vocabulary": ([json.dumps(response("p", [2, 1000], [1], reward=r)) for r in (0, 1)],
                                     ["rollouts.jsonl:1", "prompt_ids", "1000"]),
    "negative id": (spoilt(completion_ids=[1, -1]), ["rollouts.jsonl:3", "completion_ids", "-1"]),
    "id that is a fraction": (spoilt(completion_ids=[1.5]), ["rollouts.jsonl:3", "completion_ids", "1.5"]),
    "id that overflows": (spoilt(completion_ids=[1 << 70]), ["rollouts.jsonl:3", "completion_ids"]),
    "reward that is no number": (spoilt(reward=float("nan")), ["rollouts.jsonl:3", "reward", "NaN"]),
    "infinite reward": (spoilt(reward=float("inf")), ["rollouts.jsonl:3", "reward", "Infinity"]),
    "reward that is a text": (spoilt(reward="high"), ["rollouts.jsonl:3", "reward", "high"]),
    "too few old log-probs": (spoilt(old_logprobs=[-1.0]), ["rollouts.jsonl:3", "old_logprobs", "7"]),
    "too many mask entries": (spoilt(completion_mask=[1] * 8), ["rollouts.jsonl:3", "completion_mask", "7"]),
    "log-prob that is no number": (spoilt(sampling_logprobs=[float("nan")] * 7), ["rollouts.jsonl:3", "sampling_logprobs", "NaN"]),
    "another prompt under the same name": (spoilt(prompt_ids=[2, 3]), ["rollouts.jsonl:3", "prompt_ids"]),
    "key with a slip": (spoilt(old_logprob=[0] * 7), ["rollouts.jsonl:3", "old_logprob", "old_logprobs"]),
    "no JSON": (["{"], ["rollouts.jsonl:1"]),
    "no object": (["[1, 2]"], ["rollouts.jsonl:1"]),
    "no lines": ([], ["rollouts.jsonl"]),
    "no reward and no advantage": ([json.dumps(response("p", [2, 3], [4])) for _ in range(2)], ["rollouts.jsonl", "reward"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("verb", ("gradients", "verify"))
def test_spoilt_rollouts_are_refused_with_their_place(verb, case, model, tmp_path):
    lines, names = CASES[case]
    (tmp_path / "rollouts.jsonl").write_text("".join(line + "\n" for line in lines))
    arguments = {"gradients": ("--arm", "exact", "--out", tmp_path / "r.h5"), "verify": ("--out", tmp_path / "out")}[verb]
    refused(verb, *arguments, "--set", f"model.path={model}", "--set", f"data.rollouts={tmp_path / 'rollouts.jsonl'}", names=names)
    assert leftovers(tmp_path, "rollouts.jsonl", "out") == []
    assert verb == "gradients" or leftovers(tmp_path / "out") == []


def test_a_missing_file_is_named(model, tmp_path):
    refused("gradients", "--arm", "exact", "--model", model, "--rollouts", tmp_path / "none.jsonl", "--out", tmp_path / "r.h5",
            names=["none.jsonl"])


def test_a_folder_is_no_file(model, tmp_path):
    refused("gradients", "--arm", "exact", "--model", model, "--rollouts", tmp_path, "--out", tmp_path / "r.h5", names=[tmp_path])


def test_a_kl_term_needs_reference_log_probs(model, rollouts, tmp_path):
    for arm in ("reference", "exact"):
        refused("gradients", "--arm", arm, "--model", model, "--rollouts", rollouts, "--out", tmp_path / "r.h5",
                "--set", "objective.beta=0.1", names=["ref_logprobs"])
    assert leftovers(tmp_path, "rollouts.jsonl") == []
