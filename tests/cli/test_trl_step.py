"""One GRPO step by TRL's own GRPOTrainer and by ours (fixtures/trl_step.py): every objective that both have."""
import sys

import pytest

from conftest import PROGRAM, ROOT

sys.path.insert(0, str(ROOT / "fixtures"))
import trl_step  # noqa: E402


def status(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["trl_step.py", "--program", PROGRAM, *arguments])
    return trl_step.main()


def test_exact_gives_trls_loss_and_gradient_for_every_objective(monkeypatch, capsys):
    assert status(monkeypatch, "--arms", "exact") == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(trl_step.OBJECTIVES) + 2
    assert {changes["loss_type"] for changes, _ in trl_step.OBJECTIVES.values()} == {
        "grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "gspo"}


def test_so_does_the_reference(monkeypatch, capsys):
    assert status(monkeypatch, "--arms", "reference", "--only", "grpo") == 0, capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["epsilon=0.1", "beta=0.05", "scale_rewards=none", "loss_type=dapo", "use_bias_correction_kl=false"])
def test_another_objective_on_one_side_is_seen(wrong, monkeypatch, capsys):
    assert status(monkeypatch, "--arms", "exact", "--only", "grpo, clipped", "--wrong", wrong) == 1
    assert "beyond" in capsys.readouterr().out


def test_the_detached_gradient_is_not_trls(monkeypatch, capsys):
    assert status(monkeypatch, "--arms", "detached", "--only", "grpo, on policy") == 1
    line = capsys.readouterr().out.splitlines()[1]
    assert float(line.split()[-2]) > 0.1   # and its loss is TRL's: only the gradient is cut
    assert float(line.split()[-3]) <= 1e-5
