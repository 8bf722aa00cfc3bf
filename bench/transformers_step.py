#!/usr/bin/env python3
"""The gradient of one GRPO step by transformers: the full graph, response by response, summed in the weights' .grad.

A process of its own, so that its peak memory is its own. Prints one line of JSON; --gradients keeps the gradients.
"""
import argparse
import json
import pathlib
import time


def resident(field):
    """VmRSS or VmHWM of this process in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"transformers_step: no {field} in /proc/self/status")


def read_batch(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return rows[0]["prompt_ids"], [row["completion_ids"] for row in rows], [row["advantage"] for row in rows]


def one_response(model, prompt, completion, weight):
    """Forward and backward of -weight · Σ_t log-prob: GRPO on-policy, where every ratio is 1."""
    import torch
    ids = torch.tensor([prompt + completion])
    # Logits only where a response token is predicted: the fastest that transformers offers.
    logits = model(ids, logits_to_keep=len(completion) + 1, use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(completion).unsqueeze(1))
    (-weight * logprobs.sum()).backward()


def load(folder, attention):
    import torch
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention,
                                                              local_files_only=True)
    return model.train()


def step(model, prompt, responses, advantages):
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    for completion, advantage in zip(responses, advantages):
        one_response(model, prompt, completion, advantage / (len(responses) * len(completion)))
    return time.perf_counter() - start


def time_attention(model, prompt, completion, attention):
    model.set_attn_implementation(attention)
    start = time.perf_counter()
    one_response(model, prompt, completion, 1.0)
    return time.perf_counter() - start


def gemm_speed(size, seconds):
    import torch
    a, b = torch.randn(size, size), torch.randn(size, size)
    best, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2 * size ** 3 / (time.perf_counter() - start))
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--rollouts", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--gradients", type=pathlib.Path)
    parser.add_argument("--gemm-size", type=int, default=2048)
    options = parser.parse_args()

    import torch
    import transformers
    from safetensors.torch import save_file
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    speed = gemm_speed(options.gemm_size, 3.0)
    prompt, responses, advantages = read_batch(options.rollouts)
    libraries = resident("VmRSS")
    model = load(options.model, "sdpa")
    # Once without a clock: first touches of memory are not what is measured.
    one_response(model, prompt, responses[0], 1.0)
    tried = {attention: time_attention(model, prompt, responses[0], attention) for attention in ("sdpa", "eager")}
    attention = min(tried, key=tried.get)
    del model

    model = load(options.model, attention)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    seconds = [step(model, prompt, responses, advantages) for _ in range(options.repeat)]
    # Not above what was resident before the step: the warm-up's freed memory is still there then.
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    peak = resident("VmHWM") - libraries - weights
    if options.gradients:
        save_file({name: weight.grad for name, weight in model.named_parameters()}, options.gradients)
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, "attention": attention, "tried_attention_seconds": tried,
                      "gemm_flops_per_second": speed, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
