"""Prepares a data set of prompts for training: reads JSONL or Parquet, tokenizes with the checkpoint's own tokenizer and chat
template, and writes JSONL rows {"prompt_id", "prompt", "prompt_ids", ...the other columns} (docs/rollouts.md).

    python -m longstraw.prepare prompts.parquet --model DIR --out prompts.jsonl

Exit status: 0 done, 2 wrong use or unusable input, 3 failure while running.
"""

import argparse
import contextlib
import difflib
import json
import math
import multiprocessing
import os
import sys
import tempfile

from longstraw.worker import Failure, Tokenizer, first_line

RESERVED = ("prompts", "completions", "completion_ids")  # reward functions are called with these
OTHER_NAMES = {"messages": "prompt", "conversations": "prompt", "question": "prompt", "input_ids": "prompt_ids"}
LONG_PROMPTS = ("error", "left_truncate", "skip")
CHUNK = 64  # rows that a process tokenizes at a time


def fail(place, key, problem):
    raise Failure("input", f"{place}: {key}: {problem}" if key else f"{place}: {problem}")


def shown(value):
    """A value in a message: its JSON, shortened; "a list of 3" for a list."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= 60 else text[:60] + "..."


# ---- reading


def jsonl_rows(path):
    """Of each line that is not blank: its place for messages, its number, and the row."""

    def refuse(word):
        raise ValueError(f"got {word}, which is not JSON; wanted a finite number, or null where there is none")

    def once(pairs):
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice}: the column occurs twice")
        return dict(pairs)

    try:
        lines = open(path, "rb")
    except OSError as error:
        fail(path, "", f"can't be read: {error.strerror}")
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"), parse_constant=refuse, object_pairs_hook=once)
            except UnicodeDecodeError as error:
                fail(place, "", f"not UTF-8 at byte {error.start + 1} of the line")
            except json.JSONDecodeError as error:
                fail(place, "", f"not JSON at character {error.colno} of the line: {error.msg}")
            except (ValueError, RecursionError) as error:
                fail(place, "", first_line(error).removeprefix("ValueError: "))
            if not isinstance(row, dict):
                fail(place, "", f"got {shown(row)}, wanted a JSON object")
            yield place, number, row


def parquet_rows(path):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise Failure("config", f"{sys.executable} can't import pyarrow, which reads Parquet: {error}") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=CHUNK):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", number, row
    except (pyarrow.ArrowException, OSError) as error:
        # Reading and decompressing fail with many kinds, all of them the file's.
        where = f" after row {number}" if number else ""
        fail(path, "", f"is no usable Parquet file{where}: {first_line(error)}")


def rows_of(path):
    if not os.path.exists(path):
        fail(path, "", "can't be read: No such file or directory")
    if os.path.isdir(path):
        fail(path, "", "is a folder, wanted a JSONL or Parquet file")
    return parquet_rows(path) if path.lower().endswith((".parquet", ".pq")) else jsonl_rows(path)


# ---- checking


def check_columns(place, row):
    if row.get("prompt") is None and row.get("prompt_ids") is None:
        near = [name for name in row if name in OTHER_NAMES or difflib.get_close_matches(name, ("prompt", "prompt_ids"))]
        hint = ""
        if near:
            meant = OTHER_NAMES.get(near[0]) or difflib.get_close_matches(near[0], ("prompt", "prompt_ids"))[0]
            hint = f"; did you mean {meant} by {near[0]}?"
        fail(place, "prompt", f"is missing, wanted a text, a list of chat messages, or prompt_ids{hint}")
    for name in RESERVED:
        if name in row:
            fail(place, name, "is a name that reward functions are called with; call the column something else")


def check_json(place, key, value):
    """Parquet holds what JSON does not: dates, bytes, NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        fail(place, key, f"got {value}, wanted a finite number, or null where there is none")
    if isinstance(value, dict):
        for name, item in value.items():
            check_json(place, f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_json(place, f"{key}[{index}]", item)
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        fail(place, key, f"got {shown(value)}, wanted what JSON can hold: a text, number, list or object")


def check_prompt(place, prompt):
    if isinstance(prompt, str) and prompt:
        return
    if not isinstance(prompt, list) or not prompt:
        fail(place, "prompt", f"got {shown(prompt)}, wanted a text or a list of chat messages, not empty")
    for index, message in enumerate(prompt):
        key = f"prompt[{index}]"
        if not isinstance(message, dict):
            fail(place, key, f"got {shown(message)}, wanted a chat message")
        for part in ("role", "content"):
            if part not in message:
                fail(place, key, f'has no {part}, wanted {{"role": ..., "content": ...}}')
        if not isinstance(message["role"], str):
            fail(place, f"{key}.role", f"got {shown(message['role'])}, wanted a text")


def check_ids(place, ids):
    if not isinstance(ids, list) or not ids:
        fail(place, "prompt_ids", f"got {shown(ids)}, wanted a list of at least one token id")
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            fail(place, f"prompt_ids[{index}]", f"got {shown(token)}, wanted a token id from 0")


def prompt_id(place, value):
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value:
        return value
    fail(place, "prompt_id", f"got {shown(value)}, wanted a text that is not empty, or an integer")


def checked_rows(path):
    """The rows, each with a prompt_id of its own, and their places."""
    place_of = {}
    for place, number, row in rows_of(path):
        check_columns(place, row)
        for key, value in row.items():
            check_json(place, key, value)
        if row.get("prompt") is not None:
            check_prompt(place, row["prompt"])
        if row.get("prompt_ids") is not None:
            check_ids(place, row["prompt_ids"])
        given = row.pop("prompt_id", None)
        name = str(number) if given is None else prompt_id(place, given)
        if name in place_of:
            fail(place, "prompt_id", f"got {shown(name)}, which {place_of[name]} has already")
        place_of[name] = place
        prompt, ids = row.pop("prompt", None), row.pop("prompt_ids", None)
        yield place, {"prompt_id": name, "prompt": prompt, "prompt_ids": ids, **row}


# ---- tokenizing


def encode_all(tokenizer, template_kwargs, rows):
    """The rows with their prompt_ids, in a list; rows that have some keep them."""
    for place, row in rows:
        if row["prompt_ids"] is None:
            try:
                row["prompt_ids"] = tokenizer.encode(row["prompt"], **template_kwargs)
            except Failure as failure:
                raise Failure(failure.kind, f"{place}: prompt: {failure}") from failure
        if not row["prompt_ids"]:
            fail(place, "prompt", f"got {shown(row['prompt'])}, which has no token")
    return rows


def start_process(model, template_kwargs):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    start_process.tokenizer = Tokenizer()
    start_process.tokenizer.load(model)
    start_process.template_kwargs = template_kwargs


def encode_in_process(rows):
    try:
        return encode_all(start_process.tokenizer, start_process.template_kwargs, rows), None
    except Failure as failure:
        return None, (failure.kind, str(failure))


def chunks(rows):
    chunk = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class Late:
    """A tokenizer that is loaded for the first prompt that needs one: rows with prompt_ids do not."""

    def __init__(self, model, tokenizer):
        self.model = model
        self.tokenizer = tokenizer

    def encode(self, prompt, **template_kwargs):
        if not self.model:
            raise Failure("input", "is a text, and there is no checkpoint with a tokenizer; wanted prompt_ids")
        self.tokenizer.load(self.model)
        return self.tokenizer.encode(prompt, **template_kwargs)


def encoded(rows, model, template_kwargs, processes, tokenizer):
    if processes <= 1 or not model:
        late = Late(model, tokenizer)
        for chunk in chunks(rows):
            yield from encode_all(late, template_kwargs, chunk)
        return
    tokenizer.load(model)  # its faults are reported once, here
    with multiprocessing.get_context("spawn").Pool(processes, start_process, (model, template_kwargs)) as pool:
        for done, failure in pool.imap(encode_in_process, chunks(rows)):
            if failure:
                raise Failure(*failure)
            yield from done


# ---- the length policy, the summary, the file


class Summary:
    def __init__(self):
        self.lengths = []
        self.skipped = 0
        self.truncated = 0

    def as_dict(self):
        tokens = {"min": min(self.lengths), "mean": sum(self.lengths) / len(self.lengths), "max": max(self.lengths)}
        return {"prompts": len(self.lengths), "tokens": tokens, "skipped": self.skipped, "truncated": self.truncated}


def shortened(rows, longest, policy, summary):
    for place, row in rows:
        count = len(row["prompt_ids"])
        if longest is not None and count > longest:
            if policy == "error":
                fail(place, "prompt", f"has {count} tokens, wanted at most {longest} (left_truncate or skip would go on)")
            if policy == "skip":
                summary.skipped += 1
                continue
            row["prompt_ids"] = row["prompt_ids"][-longest:]
            summary.truncated += 1
        summary.lengths.append(len(row["prompt_ids"]))
        yield row


@contextlib.contextmanager
def whole_file(path):
    """A file beside `path` that takes its place when all went well, and is gone otherwise."""
    folder = os.path.dirname(os.path.abspath(path))
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", suffix=".partial", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp lets only its owner read
        os.replace(temporary, path)
    except OSError as error:
        raise Failure("io", f"{path}: can't be written: {error.strerror or error}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def prepare(path, out, model="", max_prompt_length=None, long_prompt="error", chat_template_kwargs=None, num_proc=1, tokenizer=None):
    """Writes `out` and returns {"prompts", "tokens": {"min", "mean", "max"}, "skipped", "truncated"}. Failure with kind "input" (the
    data set or the tokenizer can't be used), "config" or "io"; `out` is then as it was."""
    summary = Summary()
    rows = encoded(checked_rows(path), model, chat_template_kwargs or {}, num_proc, tokenizer or Tokenizer())
    with whole_file(out) as file:
        for row in shortened(rows, max_prompt_length, long_prompt, summary):
            kept = {key: value for key, value in row.items() if key != "prompt" or value is not None}
            line = json.dumps(kept, ensure_ascii=True, allow_nan=False)
            file.write(line + "\n")
        if not summary.lengths:
            if summary.skipped:
                fail(path, "", f"every prompt has more than {max_prompt_length} tokens, none is left")
            fail(path, "", "is empty, wanted at least one row with a prompt")
    return summary.as_dict()


def template_arguments(text):
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'got {text}, wanted a JSON object such as {{"enable_thinking": false}}')
    return value


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted an integer >= 1")
    return int(text)


def arguments_of(command):
    parser = argparse.ArgumentParser("longstraw prepare", description="tokenize a data set of prompts for training")
    parser.add_argument("data", help="JSONL or Parquet with a column prompt (a text or chat messages) or prompt_ids")
    parser.add_argument("--model", default="", help="checkpoint whose tokenizer and chat template are used")
    parser.add_argument("--out", required=True, help="the JSONL file to write")
    parser.add_argument("--max-prompt-length", type=positive, help="longest prompt allowed, in tokens")
    parser.add_argument("--long-prompt", choices=LONG_PROMPTS, default="error", help="what is done with a longer one")
    parser.add_argument("--chat-template-kwargs", type=template_arguments, default={}, help="a JSON object, handed to the chat template")
    parser.add_argument("--num-proc", type=positive, default=1, help="processes that tokenize")
    return parser.parse_args(command)


def main(command=None):
    arguments = arguments_of(command)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        done = prepare(arguments.data, arguments.out, arguments.model, arguments.max_prompt_length, arguments.long_prompt,
                       arguments.chat_template_kwargs, arguments.num_proc)
    except Failure as failure:
        print(f"longstraw: {failure}", file=sys.stderr)
        sys.exit(3 if failure.kind == "io" else 2)
    except KeyboardInterrupt:
        print("longstraw: stopped; nothing was written", file=sys.stderr)
        sys.exit(3)
    tokens = done["tokens"]
    text = f"{arguments.out}: {done['prompts']} prompts; tokens min {tokens['min']}, mean {tokens['mean']:.1f}, max {tokens['max']}"
    for what in ("skipped", "truncated"):
        if done[what]:
            text += f"; {done[what]} {what}, longer than {arguments.max_prompt_length}"
    print(text)


if __name__ == "__main__":
    main()
