#!/usr/bin/env python3
"""transformers' own CPU code for the gated delta rule and for Mamba-2, forward and backward, on the inputs of a tensor file.

A process of its own, so that its peak memory is its own. Prints one line of JSON; --results keeps outputs and gradients.
"""
import argparse
import json
import pathlib
import time

from transformers_step import resident

LEAVES = {"delta_rule": ("query", "key", "value", "log_decay", "beta", "state"), "state_space": ("x", "dt", "a", "b", "c", "state")}


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=LEAVES)
    parser.add_argument("inputs", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--results", type=pathlib.Path)
    return parser.parse_args()


def delta_rule(chunk):
    from transformers.models.qwen3_next import modeling_qwen3_next as module
    rule = module.torch_chunk_gated_delta_rule

    def run(query, key, value, log_decay, beta, state):
        repeat = value.shape[2] // key.shape[2]   # as the layer does before it calls the rule
        query, key = (x.repeat_interleave(repeat, dim=2) for x in (query, key))
        return rule(query, key, value, g=log_decay, beta=beta, chunk_size=chunk, initial_state=state, output_final_state=True,
                    use_qk_l2norm_in_kernel=True)

    return run


def state_space(chunk):
    from transformers.models.mamba2 import modeling_mamba2 as module

    def run(x, dt, a, b, c, state):
        return module.mamba2_chunk_scan(x, dt, a, b, c, chunk, initial_states=state, return_final_states=True)

    return run


def main():
    options = parse()
    import torch
    from safetensors.torch import load_file, save_file
    torch.set_num_threads(options.threads)
    run = {"delta_rule": delta_rule, "state_space": state_space}[options.kind](options.chunk)
    tensors = load_file(options.inputs)
    leaves = [tensors[name].requires_grad_() for name in LEAVES[options.kind]]
    before = resident("VmRSS")

    def forward():
        with torch.no_grad():
            run(*leaves)

    def both():
        out, end = run(*leaves)
        grads = torch.autograd.grad([out, end], leaves, [tensors["grad_out"].to(out.dtype), tensors["grad_end_state"]])
        return {"out": out.detach(), "end_state": end.detach(), **dict(zip(LEAVES[options.kind], grads))}

    said = {}
    for name, work in (("forward", forward), ("both", both)):
        seconds, cpu_seconds = [], []
        for _ in range(options.repeat + 1):
            start, cpu_start = time.perf_counter(), time.process_time()
            work()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        said[name], said[f"{name}_cpu"] = seconds[1:], cpu_seconds[1:]   # the first run warms up
    said["peak_bytes"] = resident("VmHWM") - before
    if options.results:
        save_file({name: tensor.contiguous() for name, tensor in both().items()}, options.results)
    print(json.dumps({**said, "chunk": options.chunk, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
