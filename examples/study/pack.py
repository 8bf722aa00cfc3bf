"""Joins study files into one small file, for keeping: pack.py OUT.h5 IN.h5 [IN.h5 ...] [--where KEY=VALUE ...] [--one-map]

Cells and attributes stay as they are (docs/study.md); small datasets move into their headers, larger ones are compressed.
`command` and `config` at the root become those of all files, one after the other. A cell that two files have is an error.
--where keeps only the cells whose attribute has that value; it may be repeated.
--one-map keeps the rows of each kind in each layer only in cells with a tail of 0, which the notebook maps.
"""
import argparse
import pathlib

import h5py

KEY = ("family", "model", "arm", "dtype", "prompt_tokens", "group_size", "response_tokens", "tail_tokens", "seed")
COMPACT_BYTES = 1024    # below, a chunk's bookkeeping is larger than what compression saves


def copy_attributes(source, target):
    for name, value in source.attrs.items():
        target.attrs.create(name, value, dtype=source.attrs.get_id(name).dtype)


def copy_dataset(source, target, name, kept):
    data = source[name]
    values = data[...] if kept is None else data[...][kept]
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if values.nbytes < COMPACT_BYTES:
        plan.set_layout(h5py.h5d.COMPACT)
    else:
        plan.set_chunk(values.shape)
        plan.set_shuffle()
        plan.set_deflate(9)
    copy = h5py.h5d.create(target.id, name.encode(), data.id.get_type(), h5py.h5s.create_simple(values.shape), plan)
    copy.write(h5py.h5s.ALL, h5py.h5s.ALL, values)


def small_group(parent, name):
    """A group that keeps its attributes in its header, where some twenty need the least."""
    plan = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    plan.set_attr_phase_change(64, 32)
    return h5py.Group(h5py.h5g.create(parent.id, name.encode(), gcpl=plan))


def copy_cell(source, target, one_map):
    copy_attributes(source, target)
    thinned = one_map and source.attrs["tail_tokens"] > 0
    kept = source["scope"].asstr()[:] != "layer_and_kind" if thinned else None
    for name in source:
        if isinstance(source[name], h5py.Group):
            copy_attributes(source[name], small_group(target, name))
        else:
            copy_dataset(source, target, name, kept)


def pack(out, inputs, where=(), one_map=False):
    seen, commands, configs = {}, [], []
    with h5py.File(out, "w", libver=("v110", "v110")) as target:
        cells = target.create_group("cells")
        for path in inputs:
            with h5py.File(path) as source:
                if source.attrs["format"] not in ("longstraw-study", b"longstraw-study"):
                    raise SystemExit(f"pack: {path}: no study")
                if not target.attrs:
                    copy_attributes(source, target)
                for name, all_of in (("command", commands), ("config", configs)):
                    value = source.attrs[name]
                    value = value.decode() if isinstance(value, bytes) else value
                    if value not in all_of:
                        all_of.append(value)
                for cell in source["cells"].values():
                    if any(str(cell.attrs[name]) != value for name, value in where):
                        continue
                    key = tuple(cell.attrs[name] for name in KEY)
                    if key in seen:
                        raise SystemExit(f"pack: {path}: has the cell {key}, and so has {seen[key]}")
                    seen[key] = path
                    copy_cell(cell, small_group(cells, f"{len(seen) - 1:06}"), one_map)
        for name, texts in (("command", commands), ("config", configs)):
            del target.attrs[name]
            target.attrs[name] = "\n".join(texts)
    return len(seen)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("inputs", type=pathlib.Path, nargs="+", metavar="IN.h5")
    parser.add_argument("--where", action="append", default=[], type=lambda text: tuple(text.split("=", 1)), metavar="KEY=VALUE")
    parser.add_argument("--one-map", action="store_true")
    options = parser.parse_args()
    if options.out in options.inputs:
        raise SystemExit(f"pack: {options.out}: is one of the inputs")
    count = pack(options.out, options.inputs, options.where, options.one_map)
    print(f"{options.out}: {count} cells, {options.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
