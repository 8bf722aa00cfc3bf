"""Small records of training runs with made-up rewards, in the layout of docs/record.md: what the comparison of rewards reads."""
import h5py
import numpy


def write_run(path, arm, seed, train=(), evals=(), *, model="weights", data="prompts", closed=True, config="", prompts=4):
    """`train` and `evals`: (step, rewards) pairs; rewards go to the prompts in turn, None is a missing one."""
    rows = [(step, split, f"{split}-{i % prompts}", i // prompts, numpy.nan if reward is None else float(reward))
            for split, steps in (("train", train), ("eval", evals)) for step, rewards in steps for i, reward in enumerate(rewards)]
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "longstraw-record", "format_version": numpy.int64(1), "arm": arm, "config": config, "model_sha256": model,
                           "data_sha256": data, "seed": numpy.int64(seed), "dtype": "float32", "device": "cpu", "world_size": numpy.int64(1),
                           "torch_version": "", "git_commit": "", "deterministic": numpy.int64(1), "closed": numpy.int64(closed)})
        file.create_group("steps")
        table = file.create_group("rewards")
        table.create_group("parts")
        text = h5py.string_dtype("utf-8")
        for name, column, kind in (("step", 0, numpy.int64), ("split", 1, text), ("prompt_id", 2, text), ("member", 3, numpy.int64),
                                   ("reward", 4, numpy.float64)):
            table.create_dataset(name, data=numpy.array([row[column] for row in rows], dtype=kind))
        table.create_dataset("length", data=numpy.ones(len(rows), dtype=numpy.int64))
    return path


def learning_run(path, arm, seed, reached, *, steps=40, eval_steps=10, rows=32, half_way=0.5, **header):
    """Rewards of 0 and 1 whose mean grows to `reached`; at `half_way` of the training it has half of it."""
    draw = numpy.random.default_rng([seed, sum(map(ord, arm))])
    level = lambda step: reached / (1 + numpy.exp(-12 * (step / steps - half_way)))
    rewards = lambda step: (draw.random(rows) < level(step)).astype(float)
    train = [(step, rewards(step)) for step in range(1, steps + 1)]
    # Every prompt of the held-out set is answered alike in all runs: what differs is how many are right.
    evals = [(step, (numpy.arange(rows) < round(level(step) * rows)).astype(float)) for step in range(eval_steps, steps + 1, eval_steps)]
    return write_run(path, arm, seed, train, evals, prompts=rows, **header)
