"""The recall experiment: the same small model, trained by GRPO from the same seeds in several ways, and whether they earn the same.

    ./run build longstraw && .venv/bin/python examples/recall/run.py out/recall                 # all, under half an hour on two cores
    ./run adopt                                                                                 # a short version

Each run is `longstraw train` with recall.yaml; each verdict `longstraw rewards`. Runs that are whole are not run again; an
interrupted one goes on. Prints a table, and writes FOLDER/verdicts.json.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import make_task  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# Difficulties: pairs in a prompt, share of right answers that supervised steps reach before, group size, optimizer steps.
TASKS = {
    "scratch": {"pairs": 3, "warm_until": 0.0, "generations": 16, "steps": 500},
    "warm": {"pairs": 4, "warm_until": 0.5, "generations": 8, "steps": 300},
}
# Name, arm, tail tokens. The prompt's state holds 2 tokens a pair; the last token, the asked key, always has its gradient.
WAYS = {
    "reference": ("reference", 0),
    "exact": ("exact", 0),
    "detached": ("detached", 0),
    "tail2": ("tail", 2),
    "tail4": ("tail", 4),
}


def program():
    folder = Path(os.environ.get("LONGSTRAW_BUILD", ROOT / "build" / "release"))
    return str(folder / "bin" / "longstraw")


def train(folder, task, way, seed):
    """One run; returns its seconds, or 0 when it was there already."""
    out = folder / f"{way}-{seed}"
    if (out / "done").exists():
        return 0.0
    arm, tail = WAYS[way]
    settings = {
        "model.path": folder / f"model-{seed}",
        "data.prompts": folder / "train.jsonl",
        "data.reward": f"{ROOT}/examples/recall/rewards.py:recalled",
        "longstraw.tail_tokens": tail,
        "rollout.num_generations": task["generations"],
        "train.eval_prompts": folder / "eval.jsonl",
        "train.arm": arm,
        "train.seed": seed,
        "train.max_steps": task["steps"],
        "train.output_dir": out,
    }
    command = [program(), "train", "--config", str(ROOT / "examples/recall/recall.yaml")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with open(out / "log.txt", "a") as log:
        # One thread a run: the model is tiny, and two runs side by side use two cores better than one run on both.
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        result = subprocess.run(command, stdout=log, stderr=log, env=environment)
    if result.returncode != 0:
        lines = (out / "log.txt").read_text().strip().splitlines()
        raise RuntimeError(f"{way}, seed {seed}: status {result.returncode}: {lines[-1] if lines else ''} ({out / 'log.txt'})")
    (out / "done").write_text(f"{time.time() - started:.1f}\n")
    return time.time() - started


def verdict(folder, way, seeds, margin):
    """The report of `longstraw rewards`: this way against the reference."""
    sides = [[str(folder / f"{name}-{seed}" / "record.h5") for seed in seeds] for name in ("reference", way)]
    command = [program(), "rewards", "--json", "--margin", str(margin), "--a", *sides[0], "--b", *sides[1]]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"longstraw rewards: {result.stderr.strip()}")
    return json.loads(result.stdout)


def run_all(folder, task, ways, seeds, jobs):
    spent = {way: 0.0 for way in ways}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(train, folder, task, way, seed): (way, seed) for way in ways for seed in seeds}
        for done in concurrent.futures.as_completed(started):
            way, seed = started[done]
            seconds = done.result()
            spent[way] += seconds
            print(f"  {way}, seed {seed}: {f'{seconds:.0f} s' if seconds else 'there already'}", file=sys.stderr, flush=True)
    return spent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where models, prompts and runs go")
    parser.add_argument("--tasks", default="scratch,warm", help="from random weights, or after a short supervised start")
    parser.add_argument("--ways", default="reference,exact,detached,tail2,tail4")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run, instead of the task's")
    parser.add_argument("--margin", type=float, default=0.05, help="difference in reward that does not matter, as a share")
    parser.add_argument("--gate", default="exact", help="ways that must be equivalent for exit status 0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once")
    args = parser.parse_args()
    ways, seeds = args.ways.split(","), [int(seed) for seed in args.seeds.split(",")]
    for option, names, known in (("--ways", ways, WAYS), ("--tasks", args.tasks.split(","), TASKS)):
        for name in names:
            if name not in known:
                parser.error(f"{option}: got {name}, wanted some of {', '.join(known)}")
    reports = {}
    for name in args.tasks.split(","):
        task = dict(TASKS[name], **({"steps": args.steps} if args.steps else {}))
        folder = args.folder / name
        if not all((folder / f"model-{seed}" / "model.safetensors").exists() for seed in seeds):
            make_task.make(folder, task["pairs"], seeds, task["warm_until"])
        spent = run_all(folder, task, ways, seeds, args.jobs)
        print(f"seconds of training: {', '.join(f'{way} {seconds:.0f}' for way, seconds in spent.items())}", flush=True)
        for way in [way for way in ways if way != "reference" and "reference" in ways]:
            reports[f"{name}/{way}"] = verdict(folder, way, seeds, args.margin)
            print_verdict(name, way, reports[f"{name}/{way}"])
    (args.folder / "verdicts.json").write_text(json.dumps(reports, indent=1) + "\n")
    return decide(reports, args.gate.split(","))


def decide(reports, gate):
    """Prints what may be adopted; the program's exit status."""
    verdicts = {}
    for key, report in reports.items():
        verdicts.setdefault(key.split("/")[1], []).append(report["verdict"])
    for way, found in verdicts.items():
        said = "may be adopted" if set(found) == {"equivalent"} else "must not be adopted" if "different" in found else "undecided"
        print(f"{way}: {said} in place of the reference ({', '.join(found)})")
    return 0 if all(set(verdicts.get(way, ["equivalent"])) == {"equivalent"} for way in gate) else 1


def print_verdict(task, way, report):
    low, high = report["difference"]["interval"]
    print(
        f"{task}: {way} against reference: reward {report['b']['mean']:.3f} against {report['a']['mean']:.3f}, "
        f"difference in [{low:+.3f}, {high:+.3f}]: {report['verdict']}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
