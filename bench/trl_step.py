#!/usr/bin/env python3
"""Times whole GRPO steps (sampling, loss, backward, AdamW) of TRL on CPU and of `longstraw train`; same model, prompt, lengths
and threads. bench/README.md says what the columns mean.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import common

REWARD = """
def reward(prompts, completions, completion_ids, **columns):
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_common_options(parser, prompt_tokens=1024, group=8, response_tokens=64)
    parser.add_argument("--arms", default="trl,exact,detached", help="comma-separated: trl, reference, exact, detached, tail")
    parser.add_argument("--steps", type=int, default=3, help="steps of each; the first is a warm-up, the median of the others is given")
    parser.add_argument("--trl-batch", type=int, default=4, help="responses of TRL whose graph exists at once")
    parser.add_argument("--trl-checkpointing", action="store_true", help="TRL with gradient checkpointing, its default (less memory, slower)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more configuration for our arms")
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    unknown = set(options.arms) - {"trl", *common.ARMS}
    if unknown:
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}")
    if options.steps < 2:
        parser.error("--steps: at least 2, since the first is a warm-up")
    if options.group % options.trl_batch:
        parser.error(f"--trl-batch: {options.trl_batch} does not divide the group of {options.group}")
    return options


def run_trl(options, prompt):
    common.say("TRL")
    command = [sys.executable, pathlib.Path(__file__).with_name("trl_train.py"), "--model", options.model, "--prompt", prompt, "--group",
               options.group, "--response-tokens", options.response_tokens, "--threads", options.threads, "--steps", options.steps,
               "--batch", options.trl_batch, *(["--checkpointing"] if options.trl_checkpointing else [])]
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True,
                          env=common.environment(options.threads))
    said = json.loads(done.stdout.splitlines()[-1])
    return {"all_seconds": said["seconds"], "seconds": statistics.median(said["seconds"][1:]),
            "phases": {"sampling": statistics.median(said["sampling_seconds"][1:])},
            "prompt_tokens_forward": said["prompt_tokens_forward"], "versions": {k: said[k] for k in ("trl", "transformers")}}


def run_ours(arm, options, folder, prompts):
    common.say(f"longstraw train, {arm}")
    out = folder / arm
    keys = {"model.threads": options.threads, "longstraw.segment_tokens": options.segment_tokens,
            "longstraw.replay_batch": options.replay_batch or options.group, "reference.attention": "sdpa",
            "rollout.num_generations": options.group, "rollout.max_completion_length": options.response_tokens,
            "rollout.stop_token_ids": "[]", "train.max_steps": options.steps, "train.prompts_per_step": 1, "train.save_steps": 0,
            "optim.lr_scheduler_type": "constant", **dict(text.split("=", 1) for text in options.set)}
    command = [common.build_folder() / "bin" / "longstraw", "train", "--arm", arm, "--model", options.model, "--prompts", prompts,
               "--reward", f"{folder / 'reward.py'}:reward", "--out", out, *[word for key, value in keys.items() for word in ("--set", f"{key}={value}")]]
    subprocess.run([str(word) for word in command], check=True, env=common.environment(options.threads), stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time" in line]
    if len(steps) != options.steps:
        raise SystemExit(f"trl_step: {len(steps)} steps in {out / 'metrics.jsonl'}, wanted {options.steps}")
    wrong = [line["completions/mean_length"] for line in steps if line["completions/mean_length"] != options.response_tokens]
    if wrong:
        raise SystemExit(f"trl_step: responses of {wrong} tokens, wanted {options.response_tokens}")
    prefix = "longstraw/seconds/"
    phases = {name.removeprefix(prefix): statistics.median(line[name] for line in steps[1:])
              for name in steps[-1] if name.startswith(prefix) and not name.endswith("/total")}
    last = steps[-1]
    return {"all_seconds": [line["step_time"] for line in steps], "seconds": statistics.median(line["step_time"] for line in steps[1:]),
            "phases": phases, "prompt_tokens_forward": {"sampling": last.get("longstraw/sampled_prompt_tokens", 0.0),
                                                        "loss": last.get("longstraw/captured_tokens", 0.0)},
            "facts": {name: last[name] for name in last if name.startswith("longstraw/") and not name.startswith(prefix)}}


def report(result, options):
    base = result["arms"].get("trl")
    rows = []
    for name, arm in result["arms"].items():
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in arm["phases"].items() if seconds >= 0.005)
        forward = arm["prompt_tokens_forward"]
        rows.append([name, f"{arm['seconds']:.2f}", f"{base['seconds'] / arm['seconds']:.1f}x" if base else "-", phases,
                     f"{forward['sampling']:,.0f}", f"{forward['loss']:,.0f}"])
    machine = result["machine"]
    head = (f"# One GRPO step, whole\n\n{options.model.name}, float32: P = {options.prompt_tokens}, G = {options.group}, {options.response_tokens} "
            f"new tokens each; sampling, rewards, loss, backward, AdamW. Segments of {options.segment_tokens}; TRL with graphs of "
            f"{options.trl_batch} responses at once, {'with' if options.trl_checkpointing else 'without'} gradient checkpointing. "
            f"{machine['cpu']}, {machine['threads']} of {machine['cores']} threads, {machine['memory_GiB']} GiB, torch {machine['torch']}. Median of "
            f"{options.steps - 1} steps after a warm-up.\n\n")
    tail = ("\nPrompt tokens forward: what one step runs through the model for the sake of the prompt, counted: in sampling, and again for\n"
            "the loss. Recomputation for the backward pass is not counted, of either.\n")
    return head + common.table(["arm", "seconds", "speed", "phases", "prompt tokens, sampling", "prompt tokens, loss"], rows) + tail


def main():
    options = parse()
    arms = {}
    with common.scratch() as folder:
        folder = pathlib.Path(folder)
        ids = common.text_ids(options.model, options.prompt_tokens)
        (folder / "prompt.json").write_text(json.dumps(ids))
        (folder / "prompts.jsonl").write_text(json.dumps({"prompt_id": "bench", "prompt_ids": ids}) + "\n")
        (folder / "reward.py").write_text(REWARD)
        for name in options.arms:
            arms[name] = run_trl(options, folder / "prompt.json") if name == "trl" else run_ours(name, options, folder, folder / "prompts.jsonl")
    result = {"format": "longstraw-bench-trl-step", "format_version": 1, "model": options.model.name, "prompt_tokens": options.prompt_tokens,
              "group": options.group, "response_tokens": options.response_tokens, "segment_tokens": options.segment_tokens,
              "steps": options.steps, "machine": common.machine(options.threads), "arms": arms}
    common.write_results(options, "trl_step", result, report(result, options))


if __name__ == "__main__":
    main()
