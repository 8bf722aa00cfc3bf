"""The notebooks run from a record alone. tests/python/data/study.h5 names the command that made it in its attribute `command`."""
import shutil

import h5py
import nbclient
import nbformat
import numpy as np
import pytest
from conftest import ROOT
from matplotlib import image

NOTEBOOK = ROOT / "notebooks/gradient_deviation.ipynb"
STUDY = ROOT / "tests/python/data/study.h5"


def execute(study, pictures, monkeypatch):
    monkeypatch.setenv("LONGSTRAW_STUDY", str(study))
    monkeypatch.setenv("LONGSTRAW_PICTURES", str(pictures))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    return notebook


def test_draws_every_picture_of_the_study(tmp_path, monkeypatch):
    notebook = execute(STUDY, tmp_path, monkeypatch)
    with h5py.File(STUDY) as study:
        cells = list(study["cells"].values())
        models = sorted({cell.attrs["model"] for cell in cells})
        first = next(c for c in cells if c.attrs["model"] == models[0] and c.attrs["tail_tokens"] == 0)
        lost = float(first["relative_l2"][list(first["scope"].asstr()[:]).index("whole")])
    names = {"over_prompt", "over_tail", "over_tail_update", *(f"where-{m}" for m in models)}
    assert {p.stem for p in tmp_path.iterdir()} == names
    for picture in tmp_path.iterdir():
        pixels = image.imread(picture)[..., :3]
        assert min(pixels.shape[:2]) > 200 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20, picture.name
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert outputs[0].text == f"{len(cells)} cells; models: {', '.join(models)}\n"
    table = next(o.data["text/html"] for o in outputs if "text/html" in o.get("data", {}))
    assert f"<td>{round(lost, 4)}</td>" in table


def test_is_committed_without_outputs():
    assert not any(cell.get("outputs") for cell in nbformat.read(NOTEBOOK, as_version=4).cells)


def test_says_that_a_file_is_no_study(tmp_path, monkeypatch):
    other = tmp_path / "other.h5"
    shutil.copy(STUDY, other)
    with h5py.File(other, "a") as file:
        file.attrs["format"] = "longstraw-record"
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="no study"):
        execute(other, tmp_path, monkeypatch)
