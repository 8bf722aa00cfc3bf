"""./run in a small checkout of its own, whose `longstraw` prints its arguments: no network, no compiler, no torch."""
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("cmake", "ninja", "flock"))), reason="needs cmake and ninja")

CMAKE = """cmake_minimum_required(VERSION 3.25)
project(toy NONE)
foreach(name longstraw longstraw-compare)
  set(made "${CMAKE_BINARY_DIR}/bin/${name}")
  add_custom_command(OUTPUT "${made}" COMMAND ${CMAKE_COMMAND} -E copy "${CMAKE_SOURCE_DIR}/${name}.sh" "${made}"
                     DEPENDS "${CMAKE_SOURCE_DIR}/${name}.sh" VERBATIM)
  add_custom_target(${name} ALL DEPENDS "${made}")
endforeach()
"""


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "check out"   # a space in the path is part of the test
    (root / "python").mkdir(parents=True)
    shutil.copy(ROOT / "run", root / "run")
    (root / "python/requirements.txt").write_text("torch==2.11.0\n")
    (root / "CMakeLists.txt").write_text(CMAKE)
    for name in ("longstraw", "longstraw-compare"):
        script = root / f"{name}.sh"
        script.write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\n')
        script.chmod(0o755)
    model = root / ".cache/smollm2-135m-instruct"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    return root


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """An environment that satisfies the small checkout: making a real one takes seconds, so few tests do."""
    return environment_with(tmp_path_factory.mktemp("given") / "env", torch="2.11.0")


@pytest.fixture
def makes_venv(checkout):
    (checkout / "python/requirements.txt").write_text("# nothing to install\n")
    return checkout


def call(root, *arguments, folder=None, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LONGSTRAW_")}
    return subprocess.run([str(root / "run"), *arguments], cwd=folder or root, text=True, capture_output=True,
                          env={**clean, "LONGSTRAW_SKIP_PACKAGES": "1", **environment}, timeout=300, check=False)


def environment_with(path, **versions):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    packages = next(pathlib.Path(path).glob("lib/python*/site-packages"))
    for name, version in versions.items():
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return str(path)


def test_help_needs_nothing(tmp_path):
    shutil.copy(ROOT / "run", tmp_path / "run")
    (tmp_path / "python").mkdir()
    (tmp_path / "python/requirements.txt").touch()
    result = call(tmp_path, "help")
    assert result.returncode == 0 and "./run verify" in result.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_verb_is_built_and_called_from_any_folder_with_its_arguments_as_they_are(checkout, given, tmp_path):
    result = call(checkout, "inspect", "two words", "--json", folder=tmp_path, LONGSTRAW_TORCH=given)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "<inspect>\n<two words>\n<--json>\n"


def test_a_second_call_does_no_step_again_but_a_changed_source_is_built(makes_venv):
    assert call(makes_venv, "inspect").returncode == 0
    second = call(makes_venv, "inspect")
    assert "making" not in second.stderr and "installing" not in second.stderr and "configuring" not in second.stderr
    (makes_venv / "longstraw.sh").write_text("#!/bin/sh\necho changed\n")
    assert call(makes_venv, "inspect").stdout == "changed\n"


def test_an_interrupted_environment_is_made_anew(makes_venv):
    assert call(makes_venv, "setup").returncode == 0
    (makes_venv / ".venv/longstraw-stamp").unlink()
    (makes_venv / ".venv/longstraw-busy").touch()
    (makes_venv / ".venv/half-made").touch()
    result = call(makes_venv, "setup")
    assert result.returncode == 0 and "making .venv" in result.stderr
    assert not (makes_venv / ".venv/half-made").exists()
    assert not (makes_venv / ".venv/longstraw-busy").exists()


def test_changed_requirements_are_installed(makes_venv):
    assert call(makes_venv, "setup").returncode == 0
    (makes_venv / "python/requirements.txt").write_text("# changed\n")
    result = call(makes_venv, "setup")
    assert "installing Python packages" in result.stderr and "making .venv" not in result.stderr


def test_a_package_that_can_not_be_had_is_reported_and_not_taken_as_done(makes_venv):
    (makes_venv / "python/requirements.txt").write_text("longstraw-no-such-package==1.0\n")
    result = call(makes_venv, "setup", PIP_NO_INDEX="1")
    assert result.returncode == 3 and "pip could not install" in result.stderr
    assert not (makes_venv / ".venv/longstraw-stamp").exists()
    (makes_venv / "python/requirements.txt").write_text("")
    assert call(makes_venv, "setup").returncode == 0


def test_a_broken_build_stops_with_status_3(checkout, given):
    (checkout / "longstraw.sh").unlink()
    result = call(checkout, "inspect", LONGSTRAW_TORCH=given)
    assert result.returncode == 3 and "the build failed" in result.stderr


def test_a_moved_checkout_is_configured_again(checkout, given, tmp_path):
    assert call(checkout, "inspect", LONGSTRAW_TORCH=given).returncode == 0
    moved = tmp_path / "moved"
    checkout.rename(moved)
    result = call(moved, "inspect", LONGSTRAW_TORCH=given)
    assert result.returncode == 0, result.stderr
    assert "configuring" in result.stderr


def test_verify_takes_the_example_unless_a_configuration_is_given(checkout, given, tmp_path):
    result = call(checkout, "verify", "--out", "o", folder=tmp_path, LONGSTRAW_TORCH=given)
    assert result.returncode == 0, result.stderr
    assert f"<--config>\n<{checkout}/examples/verify/verify.yaml>\n" in result.stdout
    assert f"<model.path={checkout}/.cache/smollm2-135m-instruct>" in result.stdout
    assert result.stdout.endswith("<--out>\n<o>\n")
    for options in (("--config", "mine.yaml"), ("--config=mine.yaml",)):
        assert call(checkout, "verify", *options, LONGSTRAW_TORCH=given).stdout.split() == ["<verify>"] + [f"<{a}>" for a in options]


def test_the_models_folder_follows_the_cache(checkout, given, tmp_path):
    other = tmp_path / "cache"
    (checkout / ".cache").rename(other)
    result = call(checkout, "verify", LONGSTRAW_CACHE=str(other), LONGSTRAW_TORCH=given)
    assert f"<model.path={other}/smollm2-135m-instruct>" in result.stdout


def test_a_given_environment_without_python_or_torch_or_with_another_torch_is_refused(checkout, tmp_path):
    cases = {str(tmp_path / "none"): "no bin/python there",
             environment_with(tmp_path / "empty"): "no torch there, wanted 2.11.0",
             environment_with(tmp_path / "old", torch="2.10.0"): "torch 2.10.0, wanted 2.11.0"}
    for path, message in cases.items():
        result = call(checkout, "setup", LONGSTRAW_TORCH=path)
        assert result.returncode == 2 and message in result.stderr, result.stderr
        assert not (checkout / ".venv").exists()


def test_a_given_environment_is_used_and_what_it_lacks_is_named(checkout, tmp_path):
    (checkout / "python/requirements.txt").write_text("torch==2.11.0\nnumpy==2.0.0\nabsent==1.0\n")
    path = environment_with(tmp_path / "given", torch="2.11.0+cpu", numpy="1.0.0")
    result = call(checkout, "inspect", "x", LONGSTRAW_TORCH=path)
    assert result.returncode == 0 and result.stdout == "<inspect>\n<x>\n"
    assert "numpy==2.0.0 (found 1.0.0)" in result.stderr and "absent==1.0" in result.stderr
    assert not (checkout / ".venv").exists()
