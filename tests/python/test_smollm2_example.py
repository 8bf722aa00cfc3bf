"""examples/smollm2 without the model: its prompts and its reward."""
import importlib.util
import json
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

EXAMPLE = ROOT / "examples/smollm2"


@pytest.fixture(scope="module")
def scored():
    """By path, as the program loads it: examples/verify has a module of the same name."""
    spec = importlib.util.spec_from_file_location("smollm2_rewards", EXAMPLE / "rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.scored


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, EXAMPLE / "make_prompts.py", folder, "--train", "40", "--eval", "10"], check=True, timeout=120)
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_only_the_first_line_is_scored_and_by_reasoning_gym(scored):
    texts = [" Dan", " dan\nQuestion: who?", " Dan\n\nQuestion", "\nDan", " Dan is", " Mackenzy", ""]
    rows = {"answer": ["Dan"] * len(texts), "metadata": [{"source_dataset": "needle_haystack"}] * len(texts)}
    assert scored(texts, **rows, prompt_id=list(range(len(texts)))) == [1, 1, 1, 0, 0, 0, 0]


def test_the_scorer_is_that_of_the_entrys_task(scored):
    with pytest.raises(ValueError, match="no_such_task"):
        scored([" 2"], ["2"], [{"source_dataset": "no_such_task"}])


def test_the_answer_is_right_and_stands_in_the_question(prompts, scored):
    for rows in prompts.values():
        for row in rows:
            question = row["prompt"].split("Question: ")[-1]
            assert f"{row['answer']} " in question.partition("\nWho ")[0]
            assert row["prompt"].endswith("\nAnswer:") and row["prompt"].count("Question: ") == 3
            assert scored([f" {row['answer']}\n"], [row["answer"]], [row["metadata"]]) == [1]


def test_no_held_out_question_is_trained_on(prompts):
    train, held_out = ({row["prompt"] for row in prompts[split]} for split in ("train", "eval"))
    assert len(train) == 40 and len(held_out) == 10 and not train & held_out


def test_the_same_prompts_every_time(prompts, tmp_path):
    subprocess.run([sys.executable, EXAMPLE / "make_prompts.py", tmp_path, "--train", "40", "--eval", "10"], check=True, timeout=120)
    for split, rows in prompts.items():
        assert [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()] == rows


def test_the_configuration_names_files_of_the_checkout():
    config = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    path, _, function = config["data"]["reward"].partition(":")
    assert (ROOT / path).is_file() and f"def {function}(" in (ROOT / path).read_text()
