"""longstraw study, end to end on tiny models: what a cell says is what the gradients say, and no cell is lost or mixed."""
import json
import random
import re
import signal
import subprocess
import time

import h5py
import numpy
import pytest

from conftest import BEYOND, GOLDEN, UNUSABLE, WITHIN, command, gradients, leftovers, refused, run, write_lines

VOCABULARY = 48
SETS = ("model.dtype=float64", "longstraw.segment_tokens=8", "model.threads=1", "rollout.temperature=3")


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.fixture
def prompts(tmp_path):
    """Three prompts, of which two have 20 tokens or more."""
    draw = random.Random(0)
    return write_lines(tmp_path / "prompts.jsonl", [{"prompt_id": name, "prompt_ids": [draw.randrange(VOCABULARY) for _ in range(tokens)]}
                                                    for name, tokens in (("short", 9), ("long", 33), ("longer", 40))])


def arguments(out, prompts, *more, models=("smollm2",), sets=SETS):
    folders = [GOLDEN / model if isinstance(model, str) else model for model in models]
    return ("study", "--models", *folders, "--prompts", prompts, "--out", out, *more, *[word for s in sets for word in ("--set", s)])


SMALL = ("--prompt-tokens", "20", "--group-sizes", "3", "--response-tokens", "6", "--tails", "0,5,all")


def study(out, prompts, *more, **options):
    return run(*arguments(out, prompts, *more, **options))


class Cell:
    def __init__(self, group):
        self.key = {name: value if isinstance(value, (int, numpy.integer)) else text(value) for name, value in group.attrs.items()}
        self.numbers = dict(group["numbers"].attrs.items())
        columns = {name: group[name][...] for name in group if name != "numbers"}
        self.rows = {}
        for i in range(len(columns["scope"])):
            place = (text(columns["scope"][i]), int(columns["layer"][i]), text(columns["kind"][i]))
            self.rows[place] = {name: values[i] for name, values in columns.items() if name not in ("scope", "layer", "kind")}

    @property
    def whole(self):
        return self.rows[("whole", -1, "")]


def cells_of(path, closed=True):
    """`closed` None: a kill may have come before or after the end."""
    with h5py.File(path) as file:
        assert closed is None or file.attrs["closed"] == closed
        return [Cell(group) for group in file["cells"].values()]


def tails(cells):
    return [(cell.key["arm"], cell.key["tail_tokens"]) for cell in cells]


def data_file(out, model="smollm2", prompt=20, group=3, response=6, seed=0, dtype="float64"):
    return out.parent / f"{out.name}.data" / f"{model}-{dtype}-P{prompt}-G{group}-R{response}-seed{seed}.jsonl"


def read_gradients(path):
    with h5py.File(path) as file:
        return {name: data[...].ravel() for name, data in file["steps/000000/gradients"].items()}


def measured(reference, candidate, names):
    """The metrics over some parameters, the plain way."""
    b, a = (numpy.concatenate([side[name] for name in names]) for side in (reference, candidate))
    update = lambda g: g / (abs(g) + 1e-8)
    cosine = lambda x, y: x @ y / numpy.sqrt((x @ x) * (y @ y)) if x.any() and y.any() else float(x.any() == y.any())
    norm = numpy.linalg.norm
    return {"elements": len(b), "reference_norm": norm(b), "candidate_norm": norm(a), "difference_norm": norm(a - b),
            "cosine": cosine(a, b), "update_cosine": cosine(update(a), update(b)), "sign_cosine": cosine(numpy.sign(a), numpy.sign(b)),
            "relative_l2": norm(a - b) / norm(b) if b.any() else 0.0}


def kind_of(name):
    return re.sub(r"experts\.\d+\.", "experts.", re.sub(r"^(model|backbone)\.layers\.\d+\.", "", name))


@pytest.mark.parametrize("model", ("smollm2", "mistral_sw", "qwen3_5", "qwen3_next", "deepseek_v32", "glm_moe_dsa", "mamba2", "nemotron_h"))
def test_a_cell_says_how_far_the_cut_gradient_is_from_the_full_graphs(model, prompts, tmp_path):
    out = tmp_path / "study.h5"
    done = study(out, prompts, *SMALL, models=[model])
    assert done.status == WITHIN, done
    cells = {cell.key["arm"]: cell for cell in cells_of(out)}
    assert list(cells) == ["detached", "tail", "exact"]
    # The oracle: full-graph gradients of the batch that was kept, whole and cut, and numpy.
    batch = data_file(out, model)
    full = {}
    for cut in ("none", "detached", "tail"):
        record = tmp_path / f"{cut}.h5"
        assert gradients("reference", GOLDEN / model, batch, record, "--reference-cut", cut, "--set", "model.dtype=float64",
                         "--set", "longstraw.tail_tokens=5", "--set", "rollout.temperature=3").status == WITHIN
        full[cut] = read_gradients(record)
    for arm in ("detached", "tail"):
        rows = cells[arm].rows
        groups = {("whole", -1, ""): list(full["none"])}
        for name in full["none"]:
            layer = re.match(r"^(?:model|backbone)\.layers\.(\d+)\.", name)
            layer = int(layer[1]) if layer else -1
            if layer >= 0:
                groups.setdefault(("layer", layer, ""), []).append(name)
            groups.setdefault(("kind", -1, kind_of(name)), []).append(name)
            groups.setdefault(("layer_and_kind", layer, kind_of(name)), []).append(name)
        assert set(rows) == set(groups)
        for place, names in groups.items():
            # Two float64 computations of a gradient agree to 1e-12 overall and 1e-10 in a parameter; a cosine or a ratio moves by
            # no more than a few of the latter. Signs and updates of elements that are zero but for rounding are left out.
            wanted = measured(full["none"], full[arm], names)
            for metric in ("elements", "reference_norm", "candidate_norm", "difference_norm", "cosine", "relative_l2"):
                scale = 1 if metric in ("elements", "cosine", "relative_l2") else wanted["reference_norm"]
                assert abs(rows[place][metric] - wanted[metric]) <= 1e-9 * scale, (arm, place, metric)
        for metric in ("update_cosine", "sign_cosine"):
            assert abs(cells[arm].whole[metric] - measured(full["none"], full[arm], list(full["none"]))[metric]) < 1e-3
    assert cells["tail"].whole["relative_l2"] < cells["detached"].whole["relative_l2"]
    assert cells["detached"].whole["relative_l2"] > 0.05


def test_the_tail_that_keeps_everything_differs_by_rounding_and_is_checked(prompts, tmp_path):
    out = tmp_path / "study.h5"
    assert study(out, prompts, *SMALL).status == WITHIN
    exact = cells_of(out)[-1]
    assert 0 < exact.whole["relative_l2"] <= 1e-12
    for cell in cells_of(out):
        assert 0 < cell.numbers["check_relative_l2"] <= 1e-12
        assert cell.numbers["recompute_mismatches"] == 0
        assert {"loss", "seconds", "peak_bytes", "whole_seconds", "whole_peak_bytes", "check_seconds"} <= set(cell.numbers)


def test_prompts_above_check_tokens_are_not_checked(prompts, tmp_path):
    out = tmp_path / "study.h5"
    assert study(out, prompts, *SMALL, "--check-tokens", "19").status == WITHIN
    assert not any("check_relative_l2" in cell.numbers for cell in cells_of(out))


def test_a_gradient_that_is_not_whole_is_said_and_decides_the_status(prompts, tmp_path):
    out = tmp_path / "study.h5"
    done = study(out, prompts, *SMALL, sets=(*SETS, "compare.whole_bound=1e-30"))
    assert done.status == BEYOND and "from the full-graph reference, beyond 1e-30" in done.err, done
    assert len(cells_of(out)) == 3  # they are kept, with the number that tells


def test_the_batch_is_the_last_tokens_of_a_prompt_that_is_long_enough(prompts, tmp_path):
    out = tmp_path / "study.h5"
    assert study(out, prompts, *SMALL, "--seeds", "0,1,2").status == WITHIN
    rows = {row["prompt_id"]: row["prompt_ids"] for row in map(json.loads, prompts.read_text().splitlines())}
    kept = {seed: json.loads(data_file(out, seed=seed).read_text()) for seed in (0, 1, 2)}
    assert [kept[seed]["prompt_id"] for seed in (0, 1, 2)] == ["long", "longer", "long"]
    for batch in kept.values():
        assert batch["prompt_ids"] == rows[batch["prompt_id"]][-20:]
        assert [len(ids) for ids in batch["completion_ids"]] == [6, 6, 6]
        assert batch["reward"] == [1, 0, 1]
    assert kept[0]["completion_ids"] != kept[2]["completion_ids"]  # the same prompt, another seed


def test_equal_responses_are_no_batch(prompts, tmp_path):
    """Cold sampling: every response is the likeliest one, and what their rewards make of it cancels to rounding."""
    done = study(tmp_path / "study.h5", prompts, *SMALL, sets=(*SETS, "rollout.temperature=0.001"))
    assert done.status == UNUSABLE and "prompt long: all responses are equal" in done.err and "rollout.temperature" in done.err, done
    assert not (tmp_path / "study.h5").exists()


def test_a_grid_is_each_with_each_and_tails_beyond_the_state_are_one_cell(prompts, tmp_path):
    out = tmp_path / "study.h5"
    done = study(out, prompts, "--prompt-tokens", "20,8,20", "--group-sizes", "2,3", "--response-tokens", "4", "--tails", "all,0,7,19,64,3")
    assert done.status == WITHIN, done
    cells = cells_of(out)
    assert len(cells) == 2 * 3 + 2 * 4
    by_prompt = {p: [cell for cell in cells if cell.key["prompt_tokens"] == p and cell.key["group_size"] == 2] for p in (8, 20)}
    assert tails(by_prompt[8]) == [("detached", 0), ("tail", 3), ("exact", 8)]
    assert tails(by_prompt[20]) == [("detached", 0), ("tail", 3), ("tail", 7), ("exact", 20)]
    assert "cell 14 of 14" in done.err and re.search(r"cell 3 of 14, about \d+ (s|min) left", done.err), done


def test_what_is_there_is_not_computed_again_and_the_table_shows_all(prompts, tmp_path):
    out, markdown = tmp_path / "study.h5", tmp_path / "table.md"
    assert study(out, prompts, *SMALL).status == WITHIN
    before = cells_of(out)
    done = study(out, prompts, "--prompt-tokens", "8,20", *SMALL[2:], "--markdown", markdown)
    assert done.status == WITHIN and "3 cells to compute" in done.err, done
    after = cells_of(out)
    assert len(after) == 6
    for old, new in zip(before, after):
        assert old.key == new.key and old.numbers == new.numbers and old.rows == new.rows  # seconds and all
    # A line a cell, the tails of a prompt below each other.
    order = [["8", "0", "detached"], ["8", "5", "tail"], ["8", "8", "exact"], ["20", "0", "detached"], ["20", "5", "tail"], ["20", "20", "exact"]]
    assert [line.split()[:3] for line in done.out.splitlines()[3:]] == order, done
    table = [line for line in markdown.read_text().splitlines() if line.startswith("|")]
    assert [[word for word in line.split() if word != "|"][:3] for line in table[2:]] == order
    again = study(out, prompts, "--prompt-tokens", "8,20", *SMALL[2:])
    assert again.status == WITHIN and "all cells of the grid are there" in again.err and again.out == done.out


def test_rows_of_each_kind_in_each_layer_can_be_left_out(prompts, tmp_path):
    full, small = tmp_path / "full.h5", tmp_path / "small.h5"
    assert study(full, prompts, *SMALL).status == WITHIN
    assert study(small, prompts, *SMALL, "--no-layer-and-kind").status == WITHIN
    for a, b in zip(cells_of(full), cells_of(small)):
        assert {place: row for place, row in a.rows.items() if place[0] != "layer_and_kind"} == b.rows
    assert small.stat().st_size < full.stat().st_size


def test_a_study_killed_at_any_moment_loses_one_cell_at_most(prompts, tmp_path):
    grid = ("--prompt-tokens", "8,20,32", "--group-sizes", "2,3", "--response-tokens", "6", "--tails", "0,3,9,all")
    whole = tmp_path / "whole.h5"
    assert study(whole, prompts, *grid).status == WITHIN
    wanted = {tuple(sorted(cell.key.items())): cell.rows for cell in cells_of(whole)}
    out = tmp_path / "study.h5"
    chance = random.Random(1)
    interrupted, had = 0, 0
    while interrupted < 6:
        process = subprocess.Popen(command(*arguments(out, prompts, *grid)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        lines, stop_after = [], chance.randrange(1, 5)
        for line in process.stderr:
            if " cell " in line:
                lines.append(line)
                if len(lines) == stop_after:
                    time.sleep(chance.uniform(0, 0.05))
                    process.send_signal(signal.SIGKILL)
        if process.wait() == WITHIN:
            break
        interrupted += 1
        found = cells_of(out, closed=None)
        assert len(found) >= had + len(lines), "a cell that was said to be done is not there"
        had = len(found)
        for cell in found:
            assert wanted[tuple(sorted(cell.key.items()))] == cell.rows
    assert interrupted > 0
    assert study(out, prompts, *grid).status == WITHIN
    assert {tuple(sorted(cell.key.items())): cell.rows for cell in cells_of(out)} == wanted
    assert leftovers(tmp_path, "prompts.jsonl", "study.h5", "study.h5.data", "whole.h5", "whole.h5.data") == []


def test_the_kept_batch_is_used_again_and_another_one_is_refused(prompts, tmp_path):
    out = tmp_path / "study.h5"
    assert study(out, prompts, *SMALL[:-1], "0,all").status == WITHIN
    batch = data_file(out)
    kept = batch.read_text()
    assert study(out, prompts, *SMALL).status == WITHIN
    assert batch.read_text() == kept and len({cell.key["data_sha256"] for cell in cells_of(out)}) == 1
    changed = json.loads(kept)
    changed["completion_ids"][0][0] ^= 1
    batch.write_text(json.dumps(changed) + "\n")
    refused(*arguments(out, prompts, *SMALL), names=[out, "data_sha256", "other inputs"])
    changed["prompt_ids"][3] ^= 1
    batch.write_text(json.dumps(changed) + "\n")
    refused(*arguments(out, prompts, *SMALL), names=[batch, "long", "last 20 tokens"])
    shorter = json.loads(kept)
    for column in ("completion_ids", "sampling_logprobs"):
        shorter[column] = [values[1:] for values in shorter[column]]
    batch.write_text(json.dumps(shorter) + "\n")
    refused(*arguments(out, prompts, *SMALL), names=[batch, "a response of 5 tokens, wanted 6"])
    batch.unlink()
    assert study(out, prompts, *SMALL).status == WITHIN  # sampled anew, the same
    assert batch.read_text() == kept


def test_other_weights_or_another_loss_are_another_study(prompts, copy_of, tmp_path):
    from safetensors.numpy import load_file, save_file

    model, out = copy_of("smollm2"), tmp_path / "study.h5"
    assert study(out, prompts, *SMALL, models=[model]).status == WITHIN
    refused(*arguments(out, prompts, *SMALL, models=[model], sets=(*SETS, "rollout.temperature=0.5")),
            names=[out, "rollout.temperature", "0.5"])
    refused(*arguments(out, prompts, *SMALL, models=[model], sets=(*SETS, "objective.loss_type=dr_grpo")),
            names=[out, "objective.loss_type", "dr_grpo"])
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, model / "model.safetensors")
    refused(*arguments(out, prompts, *SMALL, models=[model]), names=[out, "model_sha256"])
    assert len(cells_of(out)) == 3


def test_several_models_are_one_study(prompts, tmp_path):
    out = tmp_path / "study.h5"
    done = study(out, prompts, *SMALL, models=["smollm2", "qwen3_5"])
    assert done.status == WITHIN, done
    assert [cell.key["family"] for cell in cells_of(out)] == ["llama"] * 3 + ["qwen3_5_text"] * 3
    assert [cell.key["model"] for cell in cells_of(out)] == ["smollm2"] * 3 + ["qwen3_5"] * 3
    twin = tmp_path / "elsewhere" / "smollm2"
    twin.parent.mkdir()
    twin.symlink_to(GOLDEN / "qwen3")
    assert "smollm2" in refused(*arguments(tmp_path / "twins.h5", prompts, *SMALL, models=["smollm2", GOLDEN / "smollm2"]),
                                names=["two folders are named smollm2"]).err


REWARDS = '''
def token_sum(prompts, completions, completion_ids, **columns):
    return [sum(ids) / 48 for ids in completion_ids]

def only_longer(prompts, completions, completion_ids, mark, **columns):
    return [sum(ids) / 48 if m else 1.0 for ids, m in zip(completion_ids, mark)]

def constant(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completion_ids)
'''


def test_a_reward_function_scores_the_responses(prompts, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    write_lines(prompts, [{**row, "mark": row["prompt_id"] == "longer"} for row in rows])
    reward = lambda name: ("--reward", f"{tmp_path / 'rewards.py'}:{name}")
    out = tmp_path / "study.h5"
    assert study(out, prompts, *SMALL, *reward("token_sum")).status == WITHIN
    kept = json.loads(data_file(out).read_text())
    assert kept["reward"] == [sum(ids) / 48 for ids in kept["completion_ids"]]
    refused(*arguments(out, prompts, *SMALL, *reward("only_longer")), names=[out, "data.reward"])
    second = tmp_path / "second.h5"
    done = study(second, prompts, *SMALL, *reward("only_longer"))
    assert done.status == WITHIN and "prompt long: all rewards are equal" in done.err, done
    assert json.loads(data_file(second).read_text())["prompt_id"] == "longer"
    assert study(second, prompts, *SMALL, *reward("only_longer")).status == WITHIN
    done = study(tmp_path / "third.h5", prompts, *SMALL, *reward("constant"))
    assert done.status == UNUSABLE and "different responses with different rewards" in done.err, done


@pytest.mark.parametrize("changes, names", [
    (("--tails", "0,few"), ["--tails", "few", "or all"]),
    (("--tails", "-1"), ["--tails"]),
    (("--prompt-tokens", "1"), ["--prompt-tokens", "got 1"]),
    (("--group-sizes", "1"), ["--group-sizes", "got 1", "at least 2"]),
    (("--response-tokens", "0"), ["--response-tokens", "got 0"]),
    (("--seeds", "-3"), ["--seeds"]),
    (("--prompt-tokens", "41"), ["prompts.jsonl", "40 tokens", "wanted 41"]),
    (("--check-tokens", "-1"), ["--check-tokens"]),
])
def test_a_grid_that_can_not_be_is_refused(changes, names, prompts, tmp_path):
    options = [word for pair in zip(SMALL[::2], SMALL[1::2]) if pair[0] != changes[0] for word in pair]
    refused(*arguments(tmp_path / "study.h5", prompts, *options, *changes), names=names)
    assert not (tmp_path / "study.h5").exists()


def test_what_is_no_study_is_not_overwritten(prompts, model, rollouts, tmp_path):
    out = tmp_path / "record.h5"
    assert gradients("exact", model, rollouts, out).status == WITHIN
    before = out.read_bytes()
    refused(*arguments(out, prompts, *SMALL), names=[out, "no study"])
    assert out.read_bytes() == before
    refused(*arguments(prompts, prompts, *SMALL), names=[prompts])


def test_without_models_or_prompts_it_says_what_it_wants(prompts, tmp_path):
    refused("study", "--prompts", prompts, "--out", tmp_path / "s.h5", names=["--models", "model.path"])
    refused("study", "--models", GOLDEN / "smollm2", "--out", tmp_path / "s.h5", names=["data.prompts"])


def test_a_second_writer_is_told(prompts, tmp_path):
    """Two runs on one file: one of them ends with a message, none loses a cell."""
    out = tmp_path / "study.h5"
    grid = ("--prompt-tokens", "8,20,32", "--group-sizes", "2,3", "--response-tokens", "6", "--tails", "0,3,9,all")
    first = subprocess.Popen(command(*arguments(out, prompts, *grid)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in first.stderr:
        if "cell 1 of" in line:
            break
    second = study(out, prompts, *grid)
    first.stderr.read()
    assert first.wait() == WITHIN
    assert second.status == WITHIN or (second.status == UNUSABLE and f"{out}: is being written" in second.err), second
    assert len(cells_of(out)) == 2 * 3 + 2 * 4 + 2 * 4
