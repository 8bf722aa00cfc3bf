#!/usr/bin/env python3
"""Peak memory: of exact against the number of responses, and of exact against the reference at a longer prompt. Segments keep
no graph (memory_budget 0) unless --memory-budget says otherwise: with a budget, peak memory is what the budget allows.
"""
import argparse
import pathlib

import common


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_common_options(parser, prompt_tokens=4096, group=4, response_tokens=64)
    parser.set_defaults(segment_tokens=512, replay_batch=1)
    parser.add_argument("--groups", default="2,4,8,16", help="numbers of responses for the first table")
    parser.add_argument("--groups-prompt-tokens", type=int, default=1024, help="prompt of the first table")
    parser.add_argument("--memory-budget", default="0")
    return parser.parse_args()


def peak(arm, options, folder, prompt_tokens, group):
    rollouts = common.write_rollouts(folder / "rollouts.jsonl", common.make_batch(options.model, prompt_tokens, group, options.response_tokens))
    done = common.run_arm(arm, options, rollouts, folder / "record.h5", {"longstraw.memory_budget": options.memory_budget}.items())
    return {"arm": arm, "prompt_tokens": prompt_tokens, "group": group, "bytes": done["bytes"], "seconds": done["seconds"]}


def main():
    options = parse()
    groups = [int(text) for text in options.groups.split(",")]
    with common.scratch() as folder:
        folder = pathlib.Path(folder)
        by_group = [peak("exact", options, folder, options.groups_prompt_tokens, group) for group in groups]
        long = [peak(arm, options, folder, options.prompt_tokens, options.group) for arm in ("exact", "reference")]
    growth = by_group[-1]["bytes"]["peak_bytes"] / by_group[0]["bytes"]["peak_bytes"] - 1
    share = long[0]["bytes"]["peak_bytes"] / long[1]["bytes"]["peak_bytes"]
    row = lambda run: [run["arm"], run["prompt_tokens"], run["group"], common.mebibytes(run["bytes"]["peak_bytes"]),
                       common.mebibytes(run["bytes"]["planned_peak_bytes"]) if "planned_peak_bytes" in run["bytes"] else "-",
                       f"{run['seconds']['total']:.1f}"]
    columns = ["arm", "P", "G", "peak MiB", "planned MiB", "seconds"]
    text = (f"# Peak memory\n\n{options.model.name}, float32, R = {options.response_tokens}, segments of {options.segment_tokens}, "
            f"memory_budget {options.memory_budget}; bytes above the weights, with the gradients. The reference runs one response at a time "
            f"with sdpa.\n\n" + common.table(columns, [row(run) for run in by_group]) +
            f"\nFrom G = {groups[0]} to {groups[-1]} exact grows by {100 * growth:.2f} %.\n\n" + common.table(columns, [row(run) for run in long]) +
            f"\nAt P = {options.prompt_tokens} exact needs {100 * share:.1f} % of the reference's.\n")
    result = {"format": "longstraw-bench-memory", "format_version": 1, "machine": common.machine(options.threads), "by_group": by_group,
              "growth": growth, "long": long, "share_of_reference": share}
    common.write_results(options, "memory", result, text)


if __name__ == "__main__":
    main()
