#!/usr/bin/env python3
"""Times the chunked delta rule and Mamba-2 recurrence against transformers' CPU code: the same inputs, the same threads, in one
run, forward alone and forward with backward. bench/README.md says what the columns mean.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

import common

# Heads that share a key, key heads, size of key and of value, tokens per chunk. transformers' code for Mamba-2 holds
# T · chunk · heads · state numbers several times over, so only a few heads of it fit beside ours.
SHAPES = {
    "delta_rule": {"qwen3.6": dict(repeat=3, groups=16, key=128, value=128, chunk=64)},
    "state_space": {"4 heads": dict(repeat=4, groups=1, key=128, value=64, chunk=64),
                    "80 heads": dict(repeat=10, groups=8, key=128, value=64, chunk=64, alone=True)},
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=3, help="runs after one that warms up; the median is given")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all but states, decays and steps")
    parser.add_argument("--out", type=pathlib.Path, default=common.RESULTS, help="folder for the results")
    return parser.parse_args()


def make_inputs(kind, shape, tokens, dtype, path):
    """Random, with the decays that trained models have: a few tokens to a few thousand."""
    import torch
    from safetensors.torch import save_file
    draw = torch.Generator().manual_seed(0)
    narrow = getattr(torch, dtype)
    heads, groups = shape["repeat"] * shape["groups"], shape["groups"]

    def normal(*size):
        return torch.randn(*size, generator=draw).to(narrow)

    keys = (1, tokens, groups, shape["key"])
    uniform = torch.rand(1, tokens, heads, generator=draw)
    if kind == "delta_rule":
        state = torch.randn(1, heads, shape["key"], shape["value"], generator=draw)
        tensors = {"query": normal(*keys), "key": normal(*keys), "value": normal(1, tokens, heads, shape["value"]),
                   "log_decay": -10 ** (-4 * uniform), "beta": torch.rand(1, tokens, heads, generator=draw)}
    else:
        state = torch.randn(1, heads, shape["value"], shape["key"], generator=draw)
        tensors = {"x": normal(1, tokens, heads, shape["value"]), "dt": 10 ** (-3 * uniform),
                   "a": -torch.arange(1, heads + 1).float() / heads * 16, "b": normal(*keys), "c": normal(*keys)}
    tensors["state"] = state
    tensors["grad_out"] = normal(1, tokens, heads, shape["value"])
    tensors["grad_end_state"] = torch.randn(state.shape, generator=draw)
    save_file(tensors, path)


def last_line(command, threads):
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True, env=common.environment(threads))
    return json.loads(done.stdout.splitlines()[-1])


def run_ours(kind, shape, inputs, results, options):
    program = common.build_folder() / "bin" / "longstraw_bench_mixers"
    return last_line([program, kind, inputs, options.threads, options.repeat, shape["chunk"], results], options.threads)


def run_transformers(kind, shape, inputs, results, options):
    script = pathlib.Path(__file__).with_name("transformers_mixer.py")
    return last_line([sys.executable, script, kind, inputs, "--threads", options.threads, "--repeat", options.repeat,
                      "--chunk", shape["chunk"], "--results", results], options.threads)


def flops(kind, shape, tokens):
    """Of the chunked form's matrix products, forward and with backward: 2 · rows · columns · length each."""
    r, G, k, v, c = (shape[name] for name in ("repeat", "groups", "key", "value", "chunk"))
    heads = r * G
    state = heads * k * v          # a token against the state
    inside = heads * c * v         # a token's scores against its chunk's values
    pairs = heads * c * c          # gradients of pairs summed into those of the decays
    scores = G * c * k             # a token's scores, once a group
    if kind == "delta_rule":       # forward: 2 reads, 1 write; (I + A)^-1 and P; scores of queries and of keys
        forward = 3 * state + 2 * inside + 2 * scores
        backward = (forward - state - inside) + 6 * state + 4 * inside + 4 * scores + pairs   # in brackets: recomputed
    else:
        forward = 2 * state + inside + scores
        backward = (forward - state - inside) + 4 * state + 2 * inside + 2 * scores + pairs
    return 2 * tokens * forward, 2 * tokens * (forward + backward)


def distances(left, right):
    import torch
    from safetensors.torch import load_file
    a, b = load_file(left), load_file(right)
    return {name: (torch.linalg.vector_norm(b[name].double() - a[name].double()) / torch.linalg.vector_norm(a[name].double())).item()
            for name in a}


def measure(kind, name, shape, options, folder):
    inputs, files = folder / "inputs.safetensors", {side: folder / f"{side}.safetensors" for side in ("ours", "transformers")}
    make_inputs(kind, shape, options.tokens, options.dtype, inputs)
    common.say(f"{kind}, {name}: ours")
    result = {"kind": kind, "name": name, "shape": shape, "ours": run_ours(kind, shape, inputs, files["ours"], options)}
    result["flops"] = flops(kind, shape, options.tokens)
    if not shape.get("alone"):
        common.say(f"{kind}, {name}: transformers")
        result["transformers"] = run_transformers(kind, shape, inputs, files["transformers"], options)
        result["relative_l2"] = distances(files["transformers"], files["ours"])
    for path in (inputs, *files.values()):
        path.unlink(missing_ok=True)
    return result


def rows_of(result, speed):
    """One row a program: seconds, CPU seconds, how many times transformers' they fit into, share of the GEMM speed."""
    theirs = result.get("transformers")
    for side in ("ours", "transformers"):
        if side not in result:
            continue
        said = result[side]
        middle = {key: statistics.median(said[key]) for key in ("forward", "both", "forward_cpu", "both_cpu")}
        row = [result["kind"], result["name"], side, *(f"{middle[key]:.2f}" for key in middle)]
        if side == "ours":
            row += [f"{statistics.median(theirs[key]) / middle[key]:.1f}x" if theirs else "-" for key in middle]
            row += [f"{100 * count / middle[key] / speed:.0f} %" for count, key in zip(result["flops"], ("forward", "both"))]
        else:
            row += ["-"] * 6
        distance = f"{max(result['relative_l2'].values()):.1e}" if side == "ours" and theirs else "-"
        yield row + [common.mebibytes(said["peak_bytes"]), distance]


def report(result):
    machine = result["machine"]
    head = (f"# Recurrent mixers\n\n{result['tokens']} tokens of one sequence, {result['dtype']}, an initial state, gradients of "
            f"output and end state. {machine['cpu']}, {machine['threads']} of {machine['cores']} threads, "
            f"{machine['memory_GiB']} GiB, torch {machine['torch']}. GEMM: {result['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s.\n\n")
    for run in result["runs"]:
        shape = run["shape"]
        head += (f"- {run['kind']}, {run['name']}: {shape['repeat'] * shape['groups']} heads in {shape['groups']} groups, "
                 f"keys of {shape['key']}, values of {shape['value']}, chunks of {shape['chunk']}\n")
    rows = [row for run in result["runs"] for row in rows_of(run, result["gemm_flops_per_second"])]
    columns = ["mixer", "shape", "code", "forward s", "with backward s", "forward CPU s", "with backward CPU s",
               "forward", "with backward", "forward CPU", "with backward CPU", "GEMM share", "with backward", "peak MiB", "worst L2"]
    return head + "\n" + common.table(columns, rows)


def main():
    options = parse()
    speed = last_line([common.build_folder() / "bin" / "longstraw_bench_gemm", options.threads], options.threads)["flops_per_second"]
    with common.scratch() as folder:
        runs = [measure(kind, name, shape, options, pathlib.Path(folder))
                for kind, shapes in SHAPES.items() for name, shape in shapes.items()]
    result = {"format": "longstraw-bench-mixers", "format_version": 1, "tokens": options.tokens, "dtype": options.dtype,
              "repeat": options.repeat, "machine": common.machine(options.threads), "gemm_flops_per_second": speed, "runs": runs}
    common.write_results(options, "mixers", result, report(result))


if __name__ == "__main__":
    main()
