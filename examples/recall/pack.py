"""Makes a training record small enough to keep: pack.py OUT.h5 RECORD.h5 [--root FOLDER]

Of the rewards it keeps the last evaluation whole, and of every other evaluation and step one row with the mean (prompt_id "mean
of 512", member 0): the curves and the verdict of `longstraw rewards` stay what they were. Figures and attributes are kept, gradients and
responses are not. Paths of the configuration below --root (the current folder) and below the checkout become relative.
"""

import argparse
import pathlib

import h5py
import numpy as np
import pandas as pd

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def packed_rewards(rewards):
    """The rows to keep, in the order of the steps."""
    table = pd.DataFrame({name: rewards[name][:] for name in ("step", "member", "length", "reward")})
    for name in ("split", "prompt_id"):
        table[name] = rewards[name].asstr()[:]
    parts = list(rewards["parts"])
    for name in parts:
        table[f"parts/{name}"] = rewards["parts"][name][:]
    evaluations = table.step[table.split == "eval"]
    last = (table.split == "eval") & (table.step == evaluations.max())
    numbers = ["reward", *(f"parts/{name}" for name in parts)]
    means = table[~last].groupby(["step", "split"], as_index=False).agg(
        {**{name: "mean" for name in numbers}, "length": "mean", "prompt_id": "size"}
    )
    means["prompt_id"] = "mean of " + means.prompt_id.astype(str)
    means["length"] = means.length.round().astype(np.int64)
    kept = pd.concat([means.assign(member=0), table[last]]).sort_values("step", kind="stable")
    return kept, parts


def without_folders(config, folders):
    """Where a run was made says nothing to others."""
    for folder in folders:
        config = config.replace(f"{folder.resolve()}/", "")
    return config


def write_column(group, name, values, kind):
    group.create_dataset(name, data=values, dtype=kind, chunks=(len(values),), maxshape=(None,), compression="gzip", shuffle=True)


def copy_compressed(source, target, name):
    values = source[name][...]
    target.create_dataset(name, data=values, dtype=source[name].dtype, chunks=values.shape, compression="gzip", shuffle=True)


def pack(out, record, root):
    with h5py.File(record) as source, h5py.File(out, "w", libver=("earliest", "v108")) as target:
        if source.attrs["format"] != "longstraw-record" or "rewards" not in source:
            raise SystemExit(f"pack: {record}: no record of a training run")
        for name, value in source.attrs.items():
            if name == "config":
                value = without_folders(value, (root, CHECKOUT))
            target.attrs.create(name, value, dtype=source.attrs.get_id(name).dtype)
        target.create_group("steps")
        kept, parts = packed_rewards(source["rewards"])
        group = target.create_group("rewards")
        for name in ("step", "member", "length"):
            write_column(group, name, kept[name].to_numpy(np.int64), np.dtype("<i8"))
        for name in ("split", "prompt_id"):
            texts = [text.encode() for text in kept[name]]
            # Texts of one length compress; those of any length would lie uncompressed beside the column.
            write_column(group, name, texts, h5py.string_dtype("utf-8", max(map(len, texts))))
        write_column(group, "reward", kept.reward.to_numpy(float), np.dtype("<f8"))
        of_parts = group.create_group("parts")
        for name in parts:
            write_column(of_parts, name, kept[f"parts/{name}"].to_numpy(float), np.dtype("<f8"))
        if "metrics" in source:
            figures = target.create_group("metrics")
            for name in source["metrics"]:
                copy_compressed(source["metrics"], figures, name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."), help="paths below it become relative to it")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    pack(options.out, options.record, options.root)
    print(f"{options.out}: {options.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
