"""The command line and the configuration."""
import pytest

from conftest import UNUSABLE, WITHIN, refused, run

VERBS = ("verify", "gradients", "generate", "compare", "inspect")
KEYS = ("model:", "dtype:", "rollouts:", "num_generations:", "loss_type:", "prompt_gradient:", "segment_tokens:", "attention:", "gate:")


def test_help_names_every_verb():
    done = run("--help")
    assert done.status == WITHIN
    for verb in VERBS:
        assert verb in done.out


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "compare"])
def test_help_of_a_verb_names_every_section_of_the_configuration(verb):
    done = run(verb, "--help")
    assert done.status == WITHIN, done
    for word in ("--config", "--set", "--print-config", *KEYS):
        assert word in done.out, word


def test_help_of_compare_is_the_comparators_and_says_where_bounds_come_from():
    done = run("compare", "--help")
    assert done.status == WITHIN
    for word in ("--noise", "--json", "--config", "compare.whole_bound"):
        assert word in done.out


def test_version_names_commit_and_torch():
    done = run("--version")
    assert done.status == WITHIN and "commit" in done.out and "LibTorch" in done.out


@pytest.mark.parametrize("arguments", [(), ("teach",), ("gradients", "--arm", "best"), ("verify", "--depth", "3"),
                                       ("inspect", "a", "b"), ("generate", "--num-prompts", "-1")])
def test_wrong_use_is_status_2_with_a_message(arguments):
    done = run(*arguments)
    assert done.status == UNUSABLE and done.err.strip(), done


@pytest.mark.parametrize("verb", VERBS)
def test_printed_configuration_loads_to_the_same_configuration(verb, tmp_path):
    sets = ["model.path='/a folder/with: colon'", "longstraw.segment_tokens=7", "objective.epsilon_high=0.28",
            "longstraw.memory_budget=512MiB", "rollout.stop_token_ids=[1, 2]", "compare.gate=[exact, tail]"]
    first = run(verb, *[word for text in sets for word in ("--set", text)], "--print-config")
    assert first.status == WITHIN, first
    assert "segment_tokens: 7" in first.out and "a folder/with: colon" in first.out
    file = tmp_path / "config.yaml"
    file.write_text(first.out)
    second = run(verb, "--config", file, "--print-config")
    assert second.status == WITHIN and second.out == first.out


def test_the_last_set_wins_over_earlier_ones_and_over_the_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("longstraw: {segment_tokens: 1, tail_tokens: 5}\n")
    done = run("verify", "--config", file, "--set", "longstraw.segment_tokens=2", "--set", "longstraw.segment_tokens=3", "--print-config")
    assert "segment_tokens: 3" in done.out and "tail_tokens: 5" in done.out


def test_options_stand_for_configuration_keys():
    done = run("gradients", "--model", "my model", "--rollouts", "r: 1.jsonl", "--set", "data.rollouts=other", "--print-config")
    assert done.status == WITHIN, done
    assert "my model" in done.out and "r: 1.jsonl" in done.out and "other" not in done.out


def test_self_check_is_on_in_verify_unless_switched_off():
    assert "self_check: first_step" in run("verify", "--print-config").out
    assert "self_check: first_step" not in run("verify", "--set", "longstraw.self_check=off", "--print-config").out
    assert "self_check: first_step" not in run("gradients", "--print-config").out


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_key_is_named_with_the_nearest(verb, tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text("longstraw:\n  segment_token: 8\nmodel:\n  dtype: float16\n")
    refused(verb, "--config", file,
            names=["wrong.yaml:2", "longstraw.segment_token", "longstraw.segment_tokens", "wrong.yaml:4", "float16"])


def test_a_missing_configuration_file_is_named(tmp_path):
    refused("verify", "--config", tmp_path / "none.yaml", names=["none.yaml"])


@pytest.mark.parametrize("sets, names", [
    (["compare.gate=[best]"], ["compare.gate", "best", "exact"]),
    (["compare.gate=[]"], ["compare.gate", "empty"]),
    ([], ["data", "rollouts"]),
    (["data.rollouts=r.jsonl"], ["model.path"]),
])
def test_verify_says_what_it_lacks(sets, names, tmp_path):
    refused("verify", "--out", tmp_path / "out", *[word for text in sets for word in ("--set", text)], names=names)


@pytest.mark.parametrize("arguments, names", [
    (["--out", "r.h5"], ["--arm"]),
    (["--arm", "exact"], ["--out"]),
    (["--arm", "exact", "--out", "r.h5"], ["data.rollouts"]),
    (["--arm", "exact", "--out", "r.h5", "--reference-cut", "tail"], ["--reference-cut"]),
])
def test_gradients_says_what_it_lacks(arguments, names, tmp_path):
    refused("gradients", *arguments, names=names, cwd=tmp_path)


def test_rollouts_and_prompts_together_are_refused():
    refused("verify", "--set", "data.rollouts=a", "--set", "data.prompts=b", "--set", "data.reward=r.py:f", names=["data.prompts"])
