#!/usr/bin/env python3
"""The exact gradient behind a prompt whose full graph would not fit: time and peak memory."""
import argparse
import pathlib

import common


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    common.add_common_options(parser, prompt_tokens=32768, group=4, response_tokens=64)
    parser.add_argument("--arm", default="exact", choices=common.ARMS)
    parser.add_argument("--memory-budget", default="8GiB")
    return parser.parse_args()


def main():
    options = parse()
    with common.scratch() as folder:
        folder = pathlib.Path(folder)
        batch = common.make_batch(options.model, options.prompt_tokens, options.group, options.response_tokens)
        rollouts = common.write_rollouts(folder / "rollouts.jsonl", batch)
        run = common.run_arm(options.arm, options, rollouts, folder / "record.h5", {"longstraw.memory_budget": options.memory_budget}.items())
    phases = [[phase, f"{seconds:.1f}"] for phase, seconds in run["seconds"].items()]
    categories = [[name, common.mebibytes(count)] for name, count in run["bytes"].items()]
    text = (f"# A long prompt\n\n{options.model.name}, float32, {options.arm}: P = {options.prompt_tokens}, G = {options.group}, "
            f"R = {options.response_tokens}; segments of {options.segment_tokens}, memory_budget {options.memory_budget}.\n\n" +
            common.table(["phase", "seconds"], phases) + "\n" + common.table(["bytes above the weights", "MiB"], categories))
    result = {"format": "longstraw-bench-long", "format_version": 1, "machine": common.machine(options.threads), "arm": options.arm,
              "prompt_tokens": options.prompt_tokens, "group": options.group, "response_tokens": options.response_tokens, **run}
    common.write_results(options, "long", result, text)


if __name__ == "__main__":
    main()
