#!/usr/bin/env python3
"""Times one optimizer step's gradient: transformers' full graph, our reference, detached, exact; on the same batch, the same
threads, in one run. bench/README.md says what the columns mean.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import common

BENCHED = ("transformers", "reference", "detached", "exact")


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_common_options(parser, prompt_tokens=2048, group=8, response_tokens=64)
    parser.add_argument("--arms", default=",".join(BENCHED), help="comma-separated: transformers, reference, detached, tail, exact")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; the median is given")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more configuration for our arms")
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    unknown = set(options.arms) - {"transformers", *common.ARMS}
    if unknown:
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}")
    return options


def gemm(options):
    program = common.build_folder() / "bin" / "longstraw_bench_gemm"
    done = subprocess.run([str(program), str(options.threads)], check=True, capture_output=True, text=True,
                          env=common.environment(options.threads))
    return json.loads(done.stdout)["flops_per_second"]


def run_transformers(options, rollouts, gradients):
    common.say("transformers (full graph, response by response)")
    command = [sys.executable, str(pathlib.Path(__file__).with_name("transformers_step.py")), "--model", options.model,
               "--rollouts", rollouts, "--threads", options.threads, "--repeat", options.repeat, "--gradients", gradients]
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True,
                          env=common.environment(options.threads))
    said = json.loads(done.stdout.splitlines()[-1])
    seconds = said.pop("seconds")
    return {"seconds": {"total": statistics.median(seconds)}, "all_seconds": seconds, "peak_bytes": said.pop("peak_bytes"), **said}


def run_ours(arm, options, rollouts, record):
    runs = [common.run_arm(arm, options, rollouts, record, [text.split("=", 1) for text in options.set]) for _ in range(options.repeat)]
    runs.sort(key=lambda run: run["seconds"]["total"])
    middle = runs[len(runs) // 2]
    return {"seconds": middle["seconds"], "all_seconds": [run["seconds"]["total"] for run in runs],
            "peak_bytes": middle["bytes"]["peak_bytes"], "bytes": middle["bytes"], "facts": middle["facts"]}


def add_shares(arms, options, speed):
    """Of the machine's own GEMM speed: the whole step, and the prompt's forward pass."""
    P, R, G = options.prompt_tokens, options.response_tokens, options.group
    flops = common.Flops(json.loads((options.model / "config.json").read_text()))
    for name, arm in arms.items():
        own_speed = arm.get("gemm_flops_per_second", speed)
        arm["flops"] = flops.arm(name, P, R, G, arm.get("facts"))
        arm["gemm_share"] = arm["flops"] / arm["seconds"]["total"] / own_speed
        if "capture" in arm["seconds"]:
            arm["prefill_gemm_share"] = flops.state(P - 1) / arm["seconds"]["capture"] / speed


def add_distances(arms, files):
    base = "transformers" if "transformers" in arms else "reference"
    for name, arm in arms.items():
        if base in arms and name != base:
            arm["relative_l2"] = {"from": base, "value": common.relative_l2(files[base], files[name])}


def report(result, options):
    slowest = result["arms"].get("transformers") or result["arms"].get("reference")
    rows = []
    for name, arm in result["arms"].items():
        seconds = arm["seconds"]
        phases = ", ".join(f"{phase} {seconds[phase]:.2f}" for phase in ("capture", "replay", "sweep", "forward", "backward") if phase in seconds)
        speedup = f"{slowest['seconds']['total'] / seconds['total']:.1f}x" if slowest else "-"
        distance = f"{arm['relative_l2']['value']:.1e}" if "relative_l2" in arm else "-"
        rows.append([name, f"{seconds['total']:.2f}", speedup, phases or f"{arm.get('attention', '')} attention", common.mebibytes(arm["peak_bytes"]),
                     f"{100 * arm['gemm_share']:.0f} %", f"{100 * arm['prefill_gemm_share']:.0f} %" if "prefill_gemm_share" in arm else "-", distance])
    machine = result["machine"]
    head = (f"# One step's gradient\n\n{options.model.name}, float32: P = {options.prompt_tokens}, G = {options.group}, "
            f"R = {options.response_tokens}; segments of {options.segment_tokens}, {options.replay_batch or options.group} responses replayed "
            f"together. {machine['cpu']}, {machine['threads']} of {machine['cores']} threads, {machine['memory_GiB']} GiB, torch "
            f"{machine['torch']}. GEMM: {result['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s.\n\n")
    tail = ("\nPeak: bytes above the weights; of ours the allocator's high-water mark, of transformers the process's. Shares: FLOPs of the\n"
            "arm's own matrix products over its seconds, against the largest float32 GEMM speed measured in this run. L2: relative, from\n"
            "the first arm.\n")
    return head + common.table(["arm", "seconds", "speed", "phases", "peak MiB", "GEMM share", "prefill share", "L2"], rows) + tail


def main():
    options = parse()
    common.say("measuring GEMM speed")
    speed = gemm(options)
    arms = {}
    with common.scratch() as folder:
        folder = pathlib.Path(folder)
        rollouts = common.write_rollouts(folder / "rollouts.jsonl",
                                         common.make_batch(options.model, options.prompt_tokens, options.group, options.response_tokens))
        files = {name: folder / (f"{name}.safetensors" if name == "transformers" else f"{name}.h5") for name in options.arms}
        for name in options.arms:
            arms[name] = (run_transformers(options, rollouts, files[name]) if name == "transformers"
                          else run_ours(name, options, rollouts, files[name]))
        speed = max(speed, gemm(options))  # a machine that was busy at the start would flatter all shares
        add_shares(arms, options, speed)
        add_distances(arms, files)
    result = {"format": "longstraw-bench-step", "format_version": 1, "model": options.model.name, "prompt_tokens": options.prompt_tokens,
              "group": options.group, "response_tokens": options.response_tokens, "segment_tokens": options.segment_tokens,
              "replay_batch": options.replay_batch or options.group, "repeat": options.repeat, "machine": common.machine(options.threads),
              "gemm_flops_per_second": speed, "arms": arms}
    common.write_results(options, "step", result, report(result, options))


if __name__ == "__main__":
    main()
