"""What tests ask of a checkpoint outside the program's verbs (tests/support/checkpoint_tool.cpp), and transformers' model of it."""
import pathlib
import subprocess
import sys

import numpy
import torch
from transformers import AutoModelForCausalLM

from conftest import PROGRAM, ROOT

sys.path.insert(0, str(ROOT / "fixtures"))
import hf_oracle as oracle  # noqa: E402

BOUND = {"float64": 1e-10, "float32": 1e-5}


def tool(what, source, out, dtype, *arguments):
    out.mkdir(exist_ok=True)
    program = pathlib.Path(PROGRAM).with_name("longstraw_checkpoint_tool")
    done = subprocess.run([program, what, source, out, dtype, *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 0, done.stderr
    return out


def read_model(folder, dtype):
    """transformers' model of the files, in `dtype` throughout (to run it, call it inside oracle.precision(dtype))."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with oracle.precision(dtype):
        return oracle.prepare(model)


def relative(got, wanted):
    """Relative L2 of two lists of arrays, in float64."""
    got, wanted = (numpy.concatenate([numpy.asarray(x, float).ravel() for x in arrays]) for arrays in (got, wanted))
    assert numpy.isfinite(got).all() and numpy.any(wanted)
    return numpy.linalg.norm(got - wanted) / numpy.linalg.norm(wanted)


def advantages(rewards):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()


def grpo_group(model, rows):
    """Loss and log-probs of one group by transformers and autograd: the first step's GRPO, where every ratio is 1."""
    prompt = torch.tensor(rows[0]["prompt_ids"])
    responses = [torch.tensor(row["completion_ids"]) for row in rows]
    shares = advantages([row["reward"] for row in rows])
    weights = [torch.full((len(r),), a / (len(rows) * len(r))) for a, r in zip(shares, responses)]
    loss, _, logprobs = oracle.full_group(model, prompt, responses, weights)
    return loss, logprobs
