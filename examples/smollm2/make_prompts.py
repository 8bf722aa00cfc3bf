"""Makes the prompts of this example: a task of reasoning-gym as few-shot text, for training and held out.

    .venv/bin/python examples/smollm2/make_prompts.py out/smollm2

The task is needle_haystack: a few statements of the kind "Dan thrives on playing the banjo.", and the question whom one of them
is about. The answer stands in the prompt and nowhere else. A small model asked by chat template answers with chatter and is
never right; after a few worked examples it answers in their form, and is right now and then, so that GRPO has something to begin
with. The worked examples are the same in every prompt and occur in neither file.

Writes train.jsonl and eval.jsonl (docs/rollouts.md). Besides the prompt, a line has the entry's answer and metadata as
reasoning-gym made them: rewards.py hands them back to its scorer.
"""

import argparse
import json
from pathlib import Path

import reasoning_gym

TASK = "needle_haystack"
# Entry n of a data set is drawn from seed + n: seeds this far apart share no entry.
SEEDS = {"shots": 0, "train": 1_000_000, "eval": 2_000_000}


def entries(split, count, statements):
    return list(reasoning_gym.create_dataset(TASK, size=count, seed=SEEDS[split], min_num_statements=statements, max_num_statements=statements))


def asked(entry):
    return f"Question: {entry['question']}\nAnswer:"


def write_prompts(path, rows, shots):
    before = "".join(f"{asked(shot)} {shot['answer']}\n\n" for shot in shots)
    with open(path, "w") as file:
        for number, entry in enumerate(rows):
            line = {"prompt_id": f"{path.stem}-{number}", "prompt": before + asked(entry), "answer": entry["answer"], "metadata": entry["metadata"]}
            file.write(json.dumps(line) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--statements", type=int, default=3, help="statements in a prompt")
    parser.add_argument("--shots", type=int, default=2, help="worked examples before the question")
    parser.add_argument("--train", type=int, default=2000, help="prompts to train on")
    parser.add_argument("--eval", type=int, default=32, help="held-out prompts")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    shots = entries("shots", args.shots, args.statements)
    for split, count in (("train", args.train), ("eval", args.eval)):
        write_prompts(args.folder / f"{split}.jsonl", entries(split, count, args.statements), shots)


if __name__ == "__main__":
    main()
