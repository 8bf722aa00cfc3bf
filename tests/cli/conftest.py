"""The program under test, and small inputs for it. `LONGSTRAW_PROGRAM` names it; ctest sets that."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "fixtures" / "golden"
PROGRAM = os.environ.get("LONGSTRAW_PROGRAM", str(ROOT / "build" / "release" / "bin" / "longstraw"))
WITHIN, BEYOND, UNUSABLE, FAILED = 0, 1, 2, 3
ARMS = ("reference", "detached", "tail", "exact")


class Finished:
    """A run that has ended: its status, standard output and standard error."""

    def __init__(self, completed):
        self.status = completed.returncode
        self.out = completed.stdout
        self.err = completed.stderr

    def __repr__(self):
        return f"status {self.status}\n--- standard output\n{self.out}\n--- standard error\n{self.err}"

    @property
    def json(self):
        return json.loads(self.out)


def command(*arguments):
    return [PROGRAM, *map(str, arguments)]


def run(*arguments, timeout=300, **options):
    """Runs the program. A crash is a failure of every test, whatever it expects."""
    done = Finished(subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, check=False, **options))
    assert done.status >= 0, f"it was killed by a signal\n{done}"
    assert done.status in (WITHIN, BEYOND, UNUSABLE, FAILED), done
    return done


def refused(*arguments, names, status=(UNUSABLE,), **options):
    """Runs the program, expects it to refuse, and its message to name all of `names`, in one line for a person."""
    done = run(*arguments, **options)
    assert done.status in status, done
    assert done.out == "", done
    for name in names:
        assert str(name) in done.err, f"{name!r} is not in the message\n{done}"
    assert "frame #" not in done.err and "terminate called" not in done.err, done
    return done


def response(prompt_id, prompt_ids, completion_ids, **columns):
    return {"prompt_id": prompt_id, "prompt_ids": prompt_ids, "completion_ids": completion_ids, **columns}


def group(prompt_tokens=21, lengths=(9, 5, 7, 1), vocab=48, prompt_id="p", seed=0):
    """Responses with unequal rewards; ids from a small congruence, so that nothing else decides them."""
    def ids(count, offset):
        return [(offset * 13 + 7 * i * i + 5 * i + seed) % (vocab - 2) + 2 for i in range(count)]

    prompt = ids(prompt_tokens, 1)
    return [response(prompt_id, prompt, ids(n, 3 + m), reward=m / 2) for m, n in enumerate(lengths)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rollouts(tmp_path):
    return write_lines(tmp_path / "rollouts.jsonl", group())


@pytest.fixture
def model():
    return GOLDEN / "smollm2"


@pytest.fixture
def copy_of(tmp_path):
    """A golden checkpoint that a test may break."""
    def copy(variant):
        folder = tmp_path / variant
        shutil.copytree(GOLDEN / variant, folder, ignore=shutil.ignore_patterns("golden_*"))
        return folder

    return copy


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory):
    """A random model, wide enough that what bfloat16 rounds away averages out: in the golden ones a batch's error is a draw."""
    import numpy
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("model") / "wide"
    folder.mkdir()
    config = json.loads((GOLDEN / "smollm2" / "config.json").read_text())
    config.update(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=256)
    (folder / "config.json").write_text(json.dumps(config))
    draw = numpy.random.default_rng(0)
    matrix = lambda rows, columns: (draw.standard_normal((rows, columns)) / columns ** 0.5).astype(numpy.float32)
    tensors = {"model.embed_tokens.weight": matrix(256, 128), "model.norm.weight": numpy.ones(128, numpy.float32)}
    for n in range(config["num_hidden_layers"]):
        shapes = {"self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
                  "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256)}
        tensors.update({f"model.layers.{n}.{name}.weight": matrix(*shape) for name, shape in shapes.items()})
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{n}.{name}.weight"] = numpy.ones(128, numpy.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def gradients(arm, model, rollouts, out, *more, **options):
    return run("gradients", "--arm", arm, "--model", model, "--rollouts", rollouts, "--out", out, *more, **options)


def leftovers(folder, *expected):
    """What is in `folder` besides the expected files."""
    return sorted(path.name for path in folder.iterdir() if path.name not in expected)
