"""longstraw verify, end to end on tiny models."""
import json

import h5py
import pytest

from conftest import ARMS, BEYOND, GOLDEN, UNUSABLE, WITHIN, group, leftovers, refused, response, run, write_lines

FILES = ["detached.h5", "exact.h5", "noise.h5", "reference.h5", "report.json", "report.txt", "tail.h5"]


def verify(folder, *sets, **options):
    return run("verify", "--out", folder, *[word for text in sets for word in ("--set", text)], **options)


@pytest.mark.parametrize("dtype, variant", [("float64", "smollm2"), ("float64", "mistral_sw"), ("float32", "smollm2"),
                                            ("float32", "mistral_sw"), ("float32", "wide"), ("bfloat16", "wide")])
def test_exact_passes_and_the_report_keeps_its_contract(variant, dtype, wide_model, tmp_path):
    out = tmp_path / "out"
    wide = variant == "wide"
    prompt, lengths = (100, [24, 17, 30, 20]) if wide else (21, [9, 5, 7, 1])
    rollouts = write_lines(tmp_path / "rollouts.jsonl", group(prompt, lengths, vocab=256 if wide else 48))
    done = verify(out, f"model.path={wide_model if wide else GOLDEN / variant}", f"model.dtype={dtype}", f"data.rollouts={rollouts}",
                  f"longstraw.segment_tokens={32 if wide else 8}", "longstraw.replay_batch=3", "longstraw.tail_tokens=4")
    assert done.status == WITHIN, done
    assert leftovers(out) == FILES
    assert done.out == (out / "report.txt").read_text()
    for arm in ARMS:
        assert arm in done.out

    report = json.loads((out / "report.json").read_text())
    assert (report["format"], report["format_version"]) == ("longstraw-report", 1)
    assert (report["verdict"], report["exit_status"]) == ("pass", 0)
    assert report["batch"] == {"prompts": 1, "prompt_tokens": [prompt], "group_size": 4, "response_tokens": lengths}
    assert set(report["arms"]) == set(ARMS)
    assert {"peak_bytes", "seconds", "loss"} <= set(report["arms"]["reference"])
    for arm in ARMS[1:]:
        entry = report["arms"][arm]
        assert set(entry["gradient"]) >= {"cosine", "relative_l2", "norm_ratio", "sign_agreement", "noise_floor_relative_l2",
                                          "worst_parameter"}
        assert set(entry["gradient"]["worst_parameter"]) >= {"name", "relative_l2"}
        assert set(entry) >= {"update_cosine", "peak_bytes", "seconds", "loss", "verdict"}
        assert set(entry["seconds"]) >= {"capture", "replay", "sweep", "total"}
        assert entry["peak_bytes"] > 0 and entry["gradient"]["noise_floor_relative_l2"] > 0
    assert report["arms"]["exact"]["verdict"] == "pass"
    # The loss is the same however the gradient is taken. On-policy every ratio is 1, so it is a weighted sum of the
    # advantages, of order 1, in the dtype of the log-probs (float32 under bfloat16): a few dozen roundings.
    rounding = 2.3e-16 if dtype == "float64" else 1.2e-7
    losses = [report["arms"][arm]["loss"] for arm in ARMS]
    assert max(losses) - min(losses) <= 64 * rounding
    # Random weights do attend to the prompt: dropping its gradient is no small matter.
    distance = {arm: report["arms"][arm]["gradient"]["relative_l2"] for arm in ARMS[1:]}
    assert distance["exact"] < distance["tail"] / 10 and distance["tail"] < distance["detached"] and distance["detached"] > 0.05
    assert [report["arms"][arm]["verdict"] for arm in ARMS[1:]] == ["fail", "fail", "pass"]


def test_records_share_their_inputs_and_name_their_arm(model, rollouts, tmp_path):
    out = tmp_path / "out"
    assert verify(out, f"model.path={model}", f"data.rollouts={rollouts}").status == WITHIN
    headers = {}
    for name in (*ARMS, "noise"):
        with h5py.File(out / f"{name}.h5") as file:
            headers[name] = {key: file.attrs[key] for key in ("arm", "model_sha256", "data_sha256", "seed", "dtype")}
    for key in ("model_sha256", "data_sha256", "seed"):
        assert len({header[key] for header in headers.values()}) == 1
    text = lambda value: value.decode() if isinstance(value, bytes) else value
    assert [text(headers[arm]["arm"]) for arm in ARMS] == list(ARMS)
    assert text(headers["noise"]["dtype"]) == "float64" and text(headers["noise"]["arm"]) == "reference"


def test_records_tell_where_forward_passes_part_and_what_was_checked(model, rollouts, tmp_path):
    out, plain = tmp_path / "out", tmp_path / "plain"
    more = (f"model.path={model}", f"data.rollouts={rollouts}", "model.dtype=float64", "longstraw.segment_tokens=8")
    assert verify(out, *more).status == WITHIN
    assert verify(plain, *more, "record.trace=false").status == WITHIN
    traces = {}
    for arm in ARMS:
        with h5py.File(out / f"{arm}.h5") as traced, h5py.File(plain / f"{arm}.h5") as untraced:
            step, other = traced["steps/000000"], untraced["steps/000000"]
            traces[arm] = {point: values[...] for point, values in step["responses/trace"].items()}
            assert "trace" not in other["responses"]
            if arm != "reference":   # which computes nothing again
                assert dict(step["checks"].attrs) == {"changed_choices": 0, "recompute_mismatches": 0}
            # Looking on changes no bit.
            for name, gradient in step["gradients"].items():
                assert gradient[...].tobytes() == other[f"gradients/{name}"][...].tobytes()
    reference = traces["reference"]
    assert "0000.embedding" in reference and sum(point.endswith(".attention") for point in reference) == 2
    for arm in ARMS[1:]:
        assert list(traces[arm]) == list(reference)
        for point, values in reference.items():
            assert values.std() > 0
            assert abs(traces[arm][point] - values).max() <= 1e-12 * abs(values).max()


@pytest.mark.parametrize("gate, status", [("[detached]", BEYOND), ("[exact, tail]", BEYOND), ("[exact]", WITHIN)])
def test_the_gate_decides_the_exit_status(gate, status, model, rollouts, tmp_path):
    out = tmp_path / "out"
    done = verify(out, f"model.path={model}", f"data.rollouts={rollouts}", f"compare.gate={gate}", "longstraw.tail_tokens=2")
    assert done.status == status, done
    report = json.loads((out / "report.json").read_text())
    assert report["exit_status"] == status and report["verdict"] == ("pass" if status == WITHIN else "fail")


def test_a_second_run_replaces_the_first(model, rollouts, tmp_path):
    out = tmp_path / "out"
    for gate in ("[detached]", "[exact]"):
        verify(out, f"model.path={model}", f"data.rollouts={rollouts}", f"compare.gate={gate}")
    assert leftovers(out) == FILES
    assert json.loads((out / "report.json").read_text())["exit_status"] == WITHIN


REWARDS = '''
def even(prompts, completions, completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def constant(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completion_ids)

def only_second(prompts, completions, completion_ids, prompt_id_column, **columns):
    return [ids[0] / 48 if name == "second" else 0.5 for ids, name in zip(completion_ids, prompt_id_column)]

def broken(prompts, completions, completion_ids, **columns):
    raise ValueError("no idea")
'''


@pytest.fixture
def sampling(tmp_path, model):
    """Keys of a run that samples responses to three prompts of token ids."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt_id": name, "prompt_ids": list(range(2, 20 + n)), "prompt_id_column": name}
            for n, name in enumerate(("first", "second", "third"))]
    write_lines(tmp_path / "prompts.jsonl", rows)
    return lambda reward: (f"model.path={model}", f"data.prompts={tmp_path / 'prompts.jsonl'}",
                           f"data.reward={tmp_path / 'rewards.py'}:{reward}", "rollout.num_generations=4",
                           "rollout.max_completion_length=6", "rollout.temperature=3")


def test_responses_are_sampled_scored_and_kept(sampling, tmp_path):
    done = verify(tmp_path / "out", *sampling("even"))
    assert done.status == WITHIN, done
    rows = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["prompt_id"] for row in rows] == ["first"] * 4
    for row in rows:
        ids = row["completion_ids"]
        assert 1 <= len(ids) <= 6 and row["reward"] == sum(i % 2 == 0 for i in ids) / len(ids)
        assert len(row["sampling_logprobs"]) == len(ids)
    # The kept rollouts are the batch: the same gradient comes from them, and the comparator takes them for the same data.
    again = run("gradients", "--arm", "exact", "--model", GOLDEN / "smollm2", "--rollouts", tmp_path / "out" / "rollouts.jsonl",
                "--out", tmp_path / "again.h5", "--set", "rollout.temperature=3")
    assert again.status == WITHIN, again
    assert run("compare", tmp_path / "out" / "reference.h5", tmp_path / "again.h5").status == WITHIN


def test_equal_rewards_are_said_and_the_next_prompt_is_taken(sampling, tmp_path):
    done = verify(tmp_path / "out", *sampling("only_second"))
    assert done.status == WITHIN, done
    assert "prompt first: all rewards are equal" in done.err
    rows = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert {row["prompt_id"] for row in rows} == {"second"}


def test_no_prompt_with_unequal_rewards_is_unusable(sampling, tmp_path):
    done = verify(tmp_path / "out", *sampling("constant"))
    assert done.status == UNUSABLE and "prompts.jsonl" in done.err and "third" in done.err, done
    assert leftovers(tmp_path / "out") == []


def test_given_rollouts_without_a_gradient_are_unusable(model, tmp_path):
    rollouts = write_lines(tmp_path / "equal.jsonl", [response("p", [3, 4], [5, 6], reward=0.1) for _ in range(3)])
    refused("verify", "--out", tmp_path / "out", "--set", f"model.path={model}", "--set", f"data.rollouts={rollouts}",
            names=["equal.jsonl", "equal in every group"])


def test_a_reward_function_that_raises_is_quoted(sampling, tmp_path):
    done = verify(tmp_path / "out", *sampling("broken"))
    assert done.status == 3 and "no idea" in done.err and "rewards.py" in done.err, done
    assert leftovers(tmp_path / "out") == []


def test_a_reward_function_that_is_not_there_is_found_before_the_model_is_read(sampling, tmp_path):
    done = verify(tmp_path / "out", *sampling("absent"))
    assert done.status == UNUSABLE and "absent" in done.err and "reading" not in done.err, done


def test_several_prompts_with_a_common_beginning_are_one_batch(model, tmp_path):
    rows = group() + group(prompt_id="q", prompt_tokens=12, lengths=(4, 2, 6))
    rollouts = write_lines(tmp_path / "r.jsonl", rows)
    done = verify(tmp_path / "out", f"model.path={model}", "model.dtype=float64", f"data.rollouts={rollouts}",
                  "objective.loss_type=dapo", "objective.scale_rewards=batch", "longstraw.segment_tokens=4")
    assert done.status == WITHIN, done
    batch = json.loads((tmp_path / "out" / "report.json").read_text())["batch"]
    assert batch["prompts"] == 2 and sorted(batch["prompt_tokens"]) == [12, 21] and len(batch["response_tokens"]) == 7
