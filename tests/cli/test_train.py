"""longstraw train: what it leaves behind, that it goes on bit for bit however it was ended, and what bad input does."""
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time

import h5py
import pytest
from safetensors.numpy import load_file

from conftest import GOLDEN, FAILED, UNUSABLE, WITHIN, command, group, leftovers, refused, run, write_lines

REWARDS = '''
def even(prompts, completions, completion_ids, **columns):
    return [sum(1.0 for token in ids if token % 2 == 0) / len(ids) for ids in completion_ids]

def wanted(prompts, completions, completion_ids, answer, **columns):
    return [1.0 if ids[0] % 7 == number else 0.0 for ids, number in zip(completion_ids, answer)]
'''
# Times differ from run to run; everything else has to be the same.
TIMES = ("step_time", "eval_runtime")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt_id": f"p{n}", "prompt_ids": [(5 * n + 3 * i + 2) % 40 + 2 for i in range(6 + n)], "answer": n % 3} for n in range(5)]
    write_lines(folder / "prompts.jsonl", rows)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="module")
def arguments(inputs):
    """A run of 12 steps in which everything that has a state takes part: shuffled epochs of 5 prompts by 2, mini-batches,
    iterations, moments, a warm-up, a KL term with a reference model that moves, evaluations, unlogged steps."""
    rewards = f"['{inputs / 'rewards.py'}:even', '{inputs / 'rewards.py'}:wanted']"
    return ["train", *settings(model__path=str(GOLDEN / "smollm2"), data__prompts=str(inputs / "prompts.jsonl"), data__reward=rewards,
                               train__eval_prompts=str(inputs / "prompts.jsonl"), model__threads=1, rollout__num_generations=4,
                               rollout__max_completion_length=5, rollout__temperature=1.5, objective__beta=0.05,
                               optim__learning_rate=0.01, optim__warmup_steps=3, optim__lr_scheduler_type="cosine",
                               train__prompts_per_step=2, train__steps_per_generation=2, train__num_iterations=2, train__max_steps=12,
                               train__save_steps=3, train__eval_steps=5, train__logging_steps=2, train__sync_ref_model=True,
                               train__ref_model_sync_steps=4, longstraw__segment_tokens=4)]


def settings(**values):
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value if isinstance(value, str) else json.dumps(value)}")]


def train(arguments, out, *more, **options):
    return run(*arguments, "--out", out, *more, **options)


def metrics(out, times=False):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    if times:
        return lines
    return [{key: value for key, value in line.items() if key not in TIMES and "/seconds/" not in key and "/bytes/" not in key}
            for line in lines]


def tensors(checkpoint):
    """Every tensor of a checkpoint by file and name, as bytes."""
    return {(str(path.relative_to(checkpoint)), name): (tensor.dtype.str, tensor.shape, tensor.tobytes())
            for path in sorted(checkpoint.rglob("*.safetensors")) for name, tensor in load_file(path).items()}


def rewards_of(record):
    with h5py.File(record) as file:
        return {name: data[...].tolist() for name, data in file["rewards"].items() if isinstance(data, h5py.Dataset)}


def same(out, whole):
    """The run in `out` ended as `whole` did."""
    assert metrics(out) == metrics(whole)
    assert rewards_of(out / "record.h5") == rewards_of(whole / "record.h5")
    assert tensors(out / "checkpoint-12") == tensors(whole / "checkpoint-12")


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """A run that nothing stopped. Not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    begin = time.monotonic()
    assert train(arguments, out).status == WITHIN
    (out / "seconds").write_text(str(time.monotonic() - begin))
    return out


@pytest.fixture
def ended(whole, tmp_path):
    """A copy of it that a test may break."""
    return shutil.copytree(whole, tmp_path / "ended")


def start(arguments, out, *more):
    return subprocess.Popen(command(*arguments, "--out", out, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_leaves_checkpoints_that_load_metrics_and_a_record(whole):
    # Every third step, and the best of the evaluations at steps 5, 10 and 12.
    assert {path.name for path in whole.glob("checkpoint-*")} >= {f"checkpoint-{step}" for step in (3, 5, 6, 9, 12)}
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(whole / "checkpoint-12")
    before = AutoModelForCausalLM.from_pretrained(GOLDEN / "smollm2")
    assert any(not (a == b).all() for a, b in zip(trained.parameters(), before.parameters()))
    lines = metrics(whole, times=True)
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [2, 4, 6, 8, 10, 12]
    last = [line for line in lines if "loss" in line][-1]
    for name in ("reward", "rewards/even/mean", "kl", "entropy", "grad_norm", "learning_rate", "completions/mean_length", "num_tokens",
                 "clip_ratio/region_mean", "step_time", "longstraw/segments"):
        assert name in last or name in lines[0], name
    assert [line["step"] for line in lines if "eval_reward" in line] == [5, 10, 12]
    with h5py.File(whole / "record.h5") as file:
        assert file.attrs["closed"] == 1
    assert run("inspect", whole / "record.h5").status == WITHIN


@pytest.mark.parametrize("arm", ("reference", "detached", "tail"))
def test_every_arm_trains(arm, arguments, tmp_path):
    assert train(arguments, tmp_path / arm, "--arm", arm).status == WITHIN
    assert (tmp_path / arm / "checkpoint-12").is_dir()


def test_the_same_run_twice_is_the_same(arguments, whole, tmp_path):
    assert train(arguments, tmp_path / "again").status == WITHIN
    same(tmp_path / "again", whole)


def test_a_run_that_is_done_says_so_and_changes_nothing(arguments, ended, whole):
    done = train(arguments, ended)
    assert done.status == WITHIN and "12 of 12" in done.err, done
    same(ended, whole)


def stop(arguments, out, number=signal.SIGTERM):
    """Signals a run after its fourth step; it saves and leaves."""
    process = start(arguments, out)
    for line in process.stderr:
        if "step 4/12" in line:
            process.send_signal(number)
            break
    rest = process.communicate(timeout=60)
    assert process.returncode == WITHIN and "save" in rest[1], rest
    assert 4 <= max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*")) < 12, rest


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(number, arguments, whole, tmp_path):
    stop(arguments, tmp_path / "out", number)
    assert train(arguments, tmp_path / "out").status == WITHIN
    same(tmp_path / "out", whole)


def test_adapters_go_on_bit_for_bit_too(arguments, tmp_path):
    arguments = [*arguments, *settings(lora__r=2, train__sync_ref_model=False, train__merge_adapters=True)]
    assert train(arguments, tmp_path / "whole").status == WITHIN
    stop(arguments, tmp_path / "out")
    assert train(arguments, tmp_path / "out").status == WITHIN
    same(tmp_path / "out", tmp_path / "whole")
    names = {path.name for path in (tmp_path / "out" / "checkpoint-12").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "merged"} <= names


def test_a_second_signal_leaves_at_once(arguments, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef slow(completions, **columns):\n    time.sleep(600)\n")
    process = start(arguments, tmp_path / "out", "--reward", f"{tmp_path / 'slow.py'}:slow")
    for line in process.stderr:
        if "training" in line:
            break
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == FAILED


def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(arguments, whole, tmp_path):
    """kill -9 at ten random moments, each time going on from what is left; a run that comes to its end is followed by another."""
    usual = float((whole / "seconds").read_text())
    draw, killed, runs = random.Random(20260714), 0, 0
    while killed < 10:
        out = tmp_path / f"out{runs}"
        process = start(arguments, out)
        try:
            process.communicate(timeout=draw.uniform(0.15, 0.9) * usual)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            continue
        assert process.returncode == WITHIN
        same(out, whole)
        runs += 1
    assert train(arguments, out).status == WITHIN
    same(out, whole)


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_bit_for_bit(arguments, whole, tmp_path):
    out, killed = tmp_path / "out", 0
    for _ in range(3):
        process = start(arguments, out)
        while process.poll() is None and not list(out.glob("*.partial")):
            time.sleep(0.0005)
        killed += process.poll() is None
        process.kill()
        process.communicate()
    assert killed > 0, "no checkpoint was caught half-made"
    assert train(arguments, out).status == WITHIN
    same(out, whole)


def test_a_checkpoint_cut_short_is_named(arguments, ended):
    file = ended / "checkpoint-12" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    refused(*arguments, "--out", ended, "--set", "train.max_steps=14", names=["checkpoint-12", "model.safetensors"])


def test_another_arm_does_not_go_on_in_the_same_folder(arguments, ended):
    refused(*arguments, "--out", ended, "--arm", "detached", "--set", "train.max_steps=14", names=["record.h5", "arm"])


def test_never_resuming_does_not_overwrite(arguments, ended):
    refused(*arguments, "--out", ended, "--set", "train.resume_from_checkpoint=never", names=["checkpoint-12", "resume_from_checkpoint"])


FAULTS = {
    "raises": ("def bad(completions, **columns):\n    raise RuntimeError('no marks today')\n", "no marks today"),
    "dies": ("import os\ndef bad(completions, **columns):\n    os._exit(7)\n", "7"),
    "hangs": ("import time\ndef bad(completions, **columns):\n    time.sleep(60)\n", "1"),
    "rubbish": ("def bad(completions, **columns):\n    return 'rubbish'\n", "rubbish"),
    "too_few": ("def bad(completions, **columns):\n    return [1.0]\n", "8"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_function_that_fails_loses_no_step(fault, arguments, inputs, whole, tmp_path):
    """It works for the first two generations, then fails; mended, the run goes on as if nothing had been."""
    source, word = FAULTS[fault]
    counter = tmp_path / "calls"
    (tmp_path / "bad.py").write_text(source + f'''
def even(prompts, completions, completion_ids, **columns):
    calls = open({str(counter)!r}, "a+")
    calls.write("x"); calls.flush(); calls.seek(0)
    if len(calls.read()) > 3:  # two generations and an evaluation
        return bad(completions)
    return [sum(1.0 for token in ids if token % 2 == 0) / len(ids) for ids in completion_ids]
''')
    out = tmp_path / "out"
    broken = ["--set", f"data.reward=['{tmp_path / 'bad.py'}:even', '{inputs / 'rewards.py'}:wanted']", "--set", "data.reward_timeout=2"]
    done = train(arguments, out, *broken)
    assert done.status == FAILED and "even" in done.err and word in done.err, done
    assert (out / "checkpoint-8").is_dir(), done
    assert train(arguments, out).status == WITHIN
    same(out, whole)


def test_missing_rewards_go_on_when_asked_to(arguments, inputs, tmp_path):
    (tmp_path / "bad.py").write_text(FAULTS["raises"][0])
    done = train(arguments, tmp_path / "out", "--set", f"data.reward=['{inputs / 'rewards.py'}:even', '{tmp_path / 'bad.py'}:bad']",
                 "--set", "data.reward_errors='null'")
    assert done.status == WITHIN and "no marks today" in done.err, done
    # One call of a generation's four steps; those of evaluations are not among them.
    failed = {line["step"]: line["longstraw/failed_reward_calls"] for line in metrics(tmp_path / "out") if "longstraw/failed_reward_calls" in line}
    assert failed == {2: 1.0, 6: 1.0, 10: 1.0}


PENALIZED = settings(train__soft_punish_cache=4, train__max_steps=1, train__num_iterations=1, train__logging_steps=1, objective__beta=0.0,
                     train__sync_ref_model=False)


@pytest.mark.parametrize("arm", ("reference", "exact"))
def test_the_overlong_penalty_is_one_more_reward_beside_weighted_ones(arm, arguments, tmp_path):
    done = train(arguments, tmp_path / "out", "--arm", arm, *PENALIZED, "--set", "objective.reward_weights=[1, 2]")
    assert done.status == WITHIN, done
    line, evaluation = metrics(tmp_path / "out")
    parts = [line[f"rewards/{name}/mean"] for name in ("even", "wanted", "soft_overlong_punishment")]
    assert parts[2] < 0
    assert line["reward"] == pytest.approx(parts[0] + 2 * parts[1] + parts[2], rel=1e-12)   # means of 8 float64 numbers
    assert evaluation["eval_reward"] == pytest.approx(evaluation["eval_rewards/even/mean"] + 2 * evaluation["eval_rewards/wanted/mean"], rel=1e-12)
    assert "eval_rewards/soft_overlong_punishment/mean" not in evaluation


@pytest.mark.parametrize("columns, weights, names", (
    ({}, "null", ("reward_1",)), ({}, "[3]", ("reward_1",)),
    ({"reward_parts": [0.25, 0.5]}, "[1, 2]", ("reward_1", "reward_2"))))
def test_the_penalty_has_its_name_beside_the_rewards_of_a_file(columns, weights, names, tmp_path):
    rows = [dict(row, reward=m / 2, **columns) for m, row in enumerate(group(lengths=(5, 3)))]
    out = tmp_path / "out"
    done = run("train", "--model", GOLDEN / "smollm2", "--rollouts", write_lines(tmp_path / "r.jsonl", rows), "--out", out, *PENALIZED,
               "--set", f"objective.reward_weights={weights}", "--set", "rollout.max_completion_length=5")
    assert done.status == WITHIN, done
    line = metrics(out)[0]
    assert {key for key in line if key.startswith("rewards/")} == {
        f"rewards/{name}/{of}" for name in (*names, "soft_overlong_punishment") for of in ("mean", "std")}
    assert line["rewards/soft_overlong_punishment/mean"] == -(1.0 + 0.5) / 2   # (5 - 4 - length) / 4 of 5 and 3 tokens
    assert line["reward"] == 0.25 - 0.75


@pytest.mark.parametrize("arm", ("reference", "exact"))
def test_an_objective_that_is_refused_costs_no_rollout(arm, arguments, tmp_path):
    (tmp_path / "calls.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w')\ndef calls(completions, **columns):\n    return [0.0] * len(completions)\n")
    wrong = ["--arm", arm, "--set", "objective.loss_type=cispo", "--set", "objective.delta=1.5"]
    refused(*arguments, "--out", tmp_path / "out", *wrong, "--reward", f"{tmp_path / 'calls.py'}:calls", names=["objective.delta", "cispo"])
    assert not (tmp_path / "out").exists() and not (tmp_path / "started").exists()
    refused("gradients", "--model", GOLDEN / "smollm2", "--rollouts", write_lines(tmp_path / "r.jsonl", group()), "--out", tmp_path / "g.h5",
            *wrong, names=["objective.delta", "cispo"])
    assert not (tmp_path / "g.h5").exists()


def test_an_empty_data_set_is_refused(arguments, tmp_path):
    empty = write_lines(tmp_path / "empty.jsonl", [])
    refused(*arguments, "--out", tmp_path / "out", "--prompts", empty, names=["empty.jsonl"])
    assert leftovers(tmp_path / "out") == []


def test_prompts_that_are_too_long_follow_the_policy(arguments, tmp_path):
    limit = ["--set", "train.max_prompt_length=8"]
    refused(*arguments, "--out", tmp_path / "a", *limit, names=["prompts.jsonl", "p3", "9", "8"])
    skipped = train(arguments, tmp_path / "b", *limit, "--set", "train.long_prompt=skip")
    assert skipped.status == WITHIN and "2 prompts" in skipped.err, skipped
    cut = train(arguments, tmp_path / "c", *limit, "--set", "train.long_prompt=left_truncate")
    assert cut.status == WITHIN and "2 prompts" in cut.err, cut
    refused(*arguments, "--out", tmp_path / "d", "--set", "train.max_prompt_length=2", "--set", "train.long_prompt=skip",
            names=["prompts.jsonl", "max_prompt_length"])


def test_a_disk_that_fills_while_saving_keeps_what_was_saved(arguments, wide_model, tmp_path):
    """Files can't grow beyond the size of a checkpoint's weights: its optimizer, twice that, does not fit."""
    arguments = [*arguments, "--model", wide_model, "--set", "train.save_steps=6",
                 "--set", "optim.lr_scheduler_type=constant"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert train(arguments, whole).status == WITHIN
    assert train(arguments, out, "--set", "train.max_steps=6").status == WITHIN
    limit = (whole / "checkpoint-12" / "model.safetensors").stat().st_size + 1000
    assert (whole / "record.h5").stat().st_size < limit
    done = train(arguments, out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert done.status == FAILED and "checkpoint-" in done.err and "too large" in done.err, done
    assert (out / "checkpoint-6").is_dir(), done
    assert train(arguments, out).status == WITHIN
    assert tensors(out / "checkpoint-12") == tensors(whole / "checkpoint-12")


def test_a_gradient_that_is_not_finite_stops_the_run_or_is_skipped(copy_of, tmp_path):
    from safetensors.numpy import save_file

    broken = copy_of("smollm2")
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.down_proj.weight"))
    weights[name][:] = 3e38
    save_file(weights, broken / "model.safetensors")
    rows = [dict(row, reward=m) for m, row in enumerate(group(lengths=(3, 2)))]
    arguments = ["train", "--model", broken, "--rollouts", write_lines(tmp_path / "r.jsonl", rows), "--set", "train.max_steps=2"]
    refused(*arguments, "--out", tmp_path / "a", status=(FAILED,), names=["gradient of", "prompt p", "train.non_finite"])
    done = run(*arguments, "--out", tmp_path / "b", "--set", "train.non_finite=skip")
    assert done.status == WITHIN and "left out" in done.err, done
    assert tensors(tmp_path / "b" / "checkpoint-2").items() >= tensors(broken).items()


def test_settings_that_exclude_each_other_are_all_named(arguments, tmp_path):
    refused(*arguments, "--out", tmp_path / "out", "--set", "train.stale_steps=2", "--set", "train.steps_per_generation=9",
            names=["train.stale_steps", "train.steps_per_generation", "detached"])


def test_groups_of_one_are_told_that_nothing_is_gained(arguments, tmp_path):
    done = train(arguments, tmp_path / "out", "--set", "rollout.num_generations=1", "--set", "train.steps_per_generation=1")
    assert done.status == WITHIN and "gains no" in done.err, done


def test_dynamic_sampling_replaces_groups_of_equal_rewards(arguments, tmp_path):
    reward = tmp_path / "some.py"
    reward.write_text("def some(prompts, completions, completion_ids, answer, **columns):\n"
                      "    return [0.0 if a == 0 else float(n % 2) for n, a in enumerate(answer)]\n")
    done = train(arguments, tmp_path / "out", "--reward", f"{reward}:some", "--set", "train.dynamic_sampling_tries=3")
    assert done.status == WITHIN, done
    lines = metrics(tmp_path / "out")
    assert any(line.get("longstraw/dropped_groups", 0) > 0 for line in lines)
    assert all(line.get("frac_reward_zero_std", 0.0) == 0.0 for line in lines)


def test_prompts_run_once_for_sampling_and_training(arguments, tmp_path):
    done = train(arguments, tmp_path / "out", *settings(train__steps_per_generation=1, train__num_iterations=1, train__logging_steps=1,
                                                        objective__beta=0.0, train__sync_ref_model=False))
    assert done.status == WITHIN, done
    for line in metrics(tmp_path / "out"):
        if "loss" in line:
            assert line["longstraw/captured_tokens"] == 0, line
            assert line["longstraw/reused_tokens"] == line["longstraw/sampled_prompt_tokens"] > 0, line


def test_only_detached_goes_on_with_stale_states_and_says_how_old_they_are(arguments, tmp_path):
    stale = ["--set", "train.stale_steps=2", "--set", "train.logging_steps=1", "--set", "objective.beta=0", "--set",
             "train.sync_ref_model=false"]
    refused(*arguments, "--out", tmp_path / "a", "--arm", "exact", *stale, names=["train.stale_steps", "exact"])
    assert train(arguments, tmp_path / "b", "--arm", "detached", *stale).status == WITHIN
    ages = [line["longstraw/staleness"] for line in metrics(tmp_path / "b") if "loss" in line]
    assert ages == [0, 1, 2, 0] * 3  # four steps a generation, of which the last is too old


def test_the_record_has_the_figures_of_metrics_jsonl(whole):
    with h5py.File(whole / "record.h5") as file:
        table = file["metrics"]
        loss = table["names"].asstr()[...].tolist().index("loss")
        losses = dict(zip(table["step"][...].tolist(), table["values"][:, loss].tolist()))
    logged = {line["step"]: line["loss"] for line in metrics(whole) if "loss" in line}
    assert logged and logged.items() <= losses.items()
