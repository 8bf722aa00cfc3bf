"""The notebooks run from records alone. tests/python/data/study.h5 names the command that made it in its attribute `command`; records of
training runs are made up here."""
import json
import os
import pathlib
import shutil
import subprocess

import h5py
import nbclient
import nbformat
import numpy as np
import pytest
from conftest import ROOT
from matplotlib import image
from reward_records import learning_run

NOTEBOOKS = ROOT / "notebooks"
STUDY = ROOT / "tests/python/data/study.h5"
COMPARE = pathlib.Path(os.environ.get("LONGSTRAW_COMPARE", ROOT / "build/release/bin/longstraw-compare"))
needs_compare = pytest.mark.skipif(not COMPARE.exists(), reason=f"{COMPARE} is not built; ./run build, or name it in LONGSTRAW_COMPARE")


def execute(name, pictures, monkeypatch, **environment):
    for variable, value in {**environment, "LONGSTRAW_PICTURES": pictures, "MPLBACKEND": "agg"}.items():
        monkeypatch.setenv(variable, str(value))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    return notebook


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def check_pictures(folder, names):
    assert {p.stem for p in folder.iterdir()} == names
    for picture in folder.iterdir():
        pixels = image.imread(picture)[..., :3]
        assert min(pixels.shape[:2]) > 200 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20, picture.name


def test_draws_every_picture_of_the_study(tmp_path, monkeypatch):
    notebook = execute("gradient_deviation", tmp_path, monkeypatch, LONGSTRAW_STUDY=STUDY)
    with h5py.File(STUDY) as study:
        cells = list(study["cells"].values())
        models = sorted({cell.attrs["model"] for cell in cells})
        first = next(c for c in cells if c.attrs["model"] == models[0] and c.attrs["tail_tokens"] == 0)
        lost = float(first["relative_l2"][list(first["scope"].asstr()[:]).index("whole")])
    check_pictures(tmp_path, {"over_prompt", "over_tail", "over_tail_update", *(f"where-{m}" for m in models)})
    outputs = outputs_of(notebook)
    assert outputs[0].text == f"{len(cells)} cells; models: {', '.join(models)}\n"
    table = next(o.data["text/html"] for o in outputs if "text/html" in o.get("data", {}))
    assert f"<td>{round(lost, 4)}</td>" in table


def test_says_that_a_file_is_no_study(tmp_path, monkeypatch):
    other = tmp_path / "other.h5"
    shutil.copy(STUDY, other)
    with h5py.File(other, "a") as file:
        file.attrs["format"] = "longstraw-record"
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="no study"):
        execute("gradient_deviation", tmp_path, monkeypatch, LONGSTRAW_STUDY=other)


REACHED = {"reference": 1.0, "exact": 1.0, "tail 2": 0.6, "tail 4": 0.9, "detached": 0.35}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two tasks, five ways, four seeds; each seed begins with weights of its own. Where a run lies is its name."""
    folder = tmp_path_factory.mktemp("trained")
    for task, ease in (("pairs3", 1.0), ("pairs4", 0.9)):
        for way, reached in REACHED.items():
            for seed in range(4):
                arm, _, tail = way.partition(" ")
                config = f"data: {{prompts: out/{task}/train.jsonl}}\nlongstraw: {{tail_tokens: {tail or 0}}}\ntrain: {{arm: {arm}, seed: {seed}}}\n"
                out = folder / task / f"{arm}{tail}-{seed}"
                out.mkdir(parents=True)
                learning_run(out / "record.h5", arm, seed, ease * reached + 0.03 * seed * (reached < 1), config=config, data=task, model=f"weights of {seed}")
    return folder


@needs_compare
def test_draws_reward_curves_and_the_verdicts_of_the_comparator(trained, tmp_path, monkeypatch):
    folders = os.pathsep.join(str(trained / task) for task in ("pairs3", "pairs4"))
    notebook = execute("reward_curves", tmp_path, monkeypatch, LONGSTRAW_REWARDS=folders, LONGSTRAW_COMPARE=COMPARE)
    check_pictures(tmp_path, {"curves", "verdicts"})
    outputs = outputs_of(notebook)
    assert outputs[0].text == "40 runs; tasks: pairs3, pairs4; ways: reference, exact, tail 2, tail 4, detached; seeds: 0, 1, 2, 3\n"
    table = next(o.data["text/plain"] for o in outputs if "verdict" in o.get("data", {}).get("text/plain", ""))
    html = next(o.data["text/html"] for o in outputs if "<th>verdict</th>" in o.get("data", {}).get("text/html", ""))
    assert html.count("<td>equivalent</td>") == 2 and html.count("<td>different</td>") >= 4, table
    sides = [sorted(map(str, trained.glob(f"pairs4/{way}-*/record.h5"))) for way in ("reference", "detached")]
    report = json.loads(subprocess.run([COMPARE, "rewards", "--json", "--a", *sides[0], "--b", *sides[1]], capture_output=True, text=True).stdout)
    assert report["verdict"] == "different" and f"<td>{round(report['difference']['mean'], 4):.4f}</td>" in html


def test_says_that_a_folder_has_no_records(tmp_path, monkeypatch):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="no records with rewards"):
        execute("reward_curves", tmp_path, monkeypatch, LONGSTRAW_REWARDS=tmp_path)


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_is_committed_without_outputs(notebook):
    assert not any(cell.get("outputs") for cell in nbformat.read(notebook, as_version=4).cells)
