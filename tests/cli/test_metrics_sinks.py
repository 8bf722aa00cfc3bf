"""Where metrics go besides metrics.jsonl: TensorBoard gets the same numbers; a sink that is not there is said once and stops nothing."""
import importlib.util
import json

import pytest

from conftest import GOLDEN, WITHIN, run, write_lines


def trained(folder, *sinks):
    rows = [{"prompt_id": f"p{n}", "prompt_ids": [5 + n, 3, 9]} for n in range(4)]
    write_lines(folder / "prompts.jsonl", rows)
    (folder / "rewards.py").write_text(
        "def even(prompts, completions, completion_ids, **columns):\n    return [float(ids[0] % 2 == 0) for ids in completion_ids]\n")
    done = run("train", "--model", GOLDEN / "llama", "--prompts", folder / "prompts.jsonl", "--reward", f"{folder / 'rewards.py'}:even",
               "--arm", "exact", "--out", folder / "out", "--set", "train.max_steps=3", "--set", "rollout.num_generations=4",
               "--set", "rollout.max_completion_length=2", "--set", f"train.report_to=[{','.join(sinks)}]")
    assert done.status == WITHIN, done
    return done, [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_gets_every_figure_of_every_line(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, lines = trained(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        for name, value in line.items():
            if name == "step" or value is None:
                continue
            found = {event.step: event.value for event in events.Scalars(name)}
            assert found[line["step"]] == pytest.approx(value, rel=1e-6, abs=1e-30), name  # TensorBoard keeps float32


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="Weights & Biases is installed here")
def test_a_sink_that_is_not_installed_is_said_once_and_stops_nothing(tmp_path):
    done, lines = trained(tmp_path, "wandb")
    assert len(lines) == 3
    assert done.err.count("no longer go to wandb") == 1 and "pip install wandb" in done.err
