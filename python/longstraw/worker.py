"""The scoring process: tokenizes, decodes and calls reward functions for the C++ trainer, which has no tokenizer.

It reads one JSON request a line and writes one JSON answer a line:

    {"id": 1, "op": "load", "model": DIR}                                 -> {"id": 1}
    {"id": 2, "op": "encode", "prompt": TEXT or [MESSAGE, ...]}           -> {"id": 2, "ids": [...]}
    {"id": 3, "op": "decode", "ids": [[...], ...], "skip_special_tokens": true}  -> {"id": 3, "texts": [...]}
    {"id": 4, "op": "prepare", "function": "rewards.py:graded"}           -> {"id": 4}
    {"id": 5, "op": "reward", "function": ..., "prompts": [...], "completions": [TEXT, ...],
     "completion_ids": [[...], ...], "columns": {NAME: [...], ...}}       -> {"id": 5, "rewards": [number or null, ...]}
    {"id": 6, "op": "prepare_prompts", "file": FILE, "model": DIR or "", "out": FILE}  -> {"id": 6, "prompts": n, "tokens": {...}, ...}
    {"op": "quit"}                                                        -> it ends

A request that fails is answered {"id": n, "error": message, "kind": "config" | "input" | "io" | "reward" | "answer"}, and the
process goes on. Reward functions have the signature of TRL's: f(prompts, completions, completion_ids, **columns) -> list of numbers,
None where there is none. The completions of chat prompts are lists of one message, as in TRL.
"""

import asyncio
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import threading
import time
import traceback


class Failure(Exception):
    """A request that can't be met; `kind` says whose doing that is."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


class Tokenizer:
    """The checkpoint's own tokenizer, loaded when first needed: importing transformers takes seconds."""

    def __init__(self):
        self.model = None
        self.tokenizer = None
        self.importing = None

    def import_early(self):
        """Imports transformers beside other work, such as the trainer's loading of the weights."""

        def run():
            try:
                from transformers import AutoTokenizer  # noqa: F401
            except Exception:
                pass  # load() meets the same fault, and reports it

        self.importing = threading.Thread(target=run, daemon=True)
        self.importing.start()

    def load(self, model):
        if self.model == model and self.tokenizer is not None:
            return
        if not os.path.isdir(model):
            raise Failure("input", f"{model}: no such folder, wanted a checkpoint with its tokenizer")
        if self.importing is not None:
            self.importing.join()
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise Failure("config", f"{sys.executable} can't import transformers, which tokenizes: {error}") from error
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except Exception as error:  # transformers raises many kinds
            raise Failure("input", f"{model}: its tokenizer can't be loaded: {first_line(error)}") from error
        self.model = model

    def get(self):
        if self.tokenizer is None:
            raise Failure("config", "no tokenizer is loaded")
        return self.tokenizer

    def encode(self, prompt, **template_kwargs):
        tokenizer = self.get()
        if isinstance(prompt, str):
            return [int(i) for i in tokenizer(prompt)["input_ids"]]
        if not tokenizer.chat_template:
            raise Failure("input", f"{self.model}: its tokenizer has no chat template; give the prompt as text")
        # As TRL does: an answer that the prompt begins is gone on with, not closed.
        goes_on = prompt[-1].get("role") == "assistant"
        try:
            ids = tokenizer.apply_chat_template(
                prompt,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                tokenize=True,
                return_dict=False,
                **template_kwargs,
            )
        except Exception as error:  # whatever a template raises
            raise Failure("input", f"the chat template of {self.model} refused the prompt: {first_line(error)}") from error
        return [int(i) for i in ids]

    def decode(self, ids, skip_special_tokens):
        tokenizer = self.get()
        return [tokenizer.decode(one, skip_special_tokens=skip_special_tokens) for one in ids]


class Rewards:
    """Reward functions by name, FILE.py:FUNCTION, each file imported once."""

    def __init__(self):
        self.modules = {}

    def get(self, name):
        path, _, function = name.rpartition(":")
        path = os.path.abspath(path)
        if path not in self.modules:
            self.modules[path] = self.load(path)
        found = getattr(self.modules[path], function, None)
        if not callable(found):
            known = [k for k, v in vars(self.modules[path]).items() if callable(v) and not k.startswith("_")]
            raise Failure("config", f"{path} has no function {function}; it has {', '.join(known) or 'none'}")
        return found

    @staticmethod
    def load(path):
        if not os.path.isfile(path):
            raise Failure("config", f"reward function: {path}: no such file")
        # As if the file were run: it may import its neighbours.
        if os.path.dirname(path) not in sys.path:
            sys.path.insert(0, os.path.dirname(path))
        name = "longstraw_reward_" + os.path.splitext(os.path.basename(path))[0]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None:
            raise Failure("config", f"reward function: {path}: is no Python file (.py)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look their module up by name
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            sys.modules.pop(name, None)
            raise Failure("reward", f"reward function: {path} can't be imported: {where_and_what(error, path)}") from error
        return module

    def call(self, name, prompts, completions, completion_ids, columns):
        function = self.get(name)
        given = [
            [{"role": "assistant", "content": completion}] if isinstance(prompt, list) else completion
            for prompt, completion in zip(prompts, completions)
        ]
        try:
            rewards = function(prompts=prompts, completions=given, completion_ids=completion_ids, **columns)
            if inspect.isawaitable(rewards):
                rewards = asyncio.run(awaited(rewards))
            if hasattr(rewards, "tolist"):  # numpy and torch
                rewards = rewards.tolist()
        except BaseException as error:  # sys.exit() too: the process goes on
            path = os.path.abspath(name.rpartition(":")[0])
            hint = ""
            if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
                hint = "; it is called with prompts, completions, completion_ids and every column: give it **columns"
            raise Failure("reward", f"reward function {name} raised {where_and_what(error, path)}{hint}") from error
        return checked(name, rewards, len(completions))


async def awaited(coroutine):
    return await coroutine


def checked(name, rewards, count):
    """The rewards as floats and None; Failure for anything else."""
    if not isinstance(rewards, (list, tuple)):
        raise Failure("answer", f"reward function {name} returned {shown(rewards)}, wanted a list of {count} numbers")
    if len(rewards) != count:
        raise Failure("answer", f"reward function {name} returned {len(rewards)} rewards for {count} completions")
    numbers = []
    for index, reward in enumerate(rewards):
        if reward is not None and hasattr(reward, "item"):
            reward = reward.item()
        if reward is not None and not isinstance(reward, (bool, int, float)):
            raise Failure(
                "answer",
                f"reward function {name} returned {shown(reward)} for completion {index}, wanted a number or None",
            )
        try:
            number = None if reward is None else float(reward)
        except OverflowError:
            number = math.inf
        if number is not None and not math.isfinite(number):
            raise Failure(
                "answer",
                f"reward function {name} returned {number} for completion {index}, wanted a finite number, "
                "or None where there is none",
            )
        numbers.append(number)
    return numbers


def shown(value):
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"


def first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def where_and_what(error, path):
    """The last line of the traceback, and the innermost place in the user's own file."""
    what = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.abspath(frame.filename) == path]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{what} ({error.filename}:{error.lineno})"
    if not own:
        return what
    return f"{what} ({path}:{own[-1].lineno}, in {own[-1].name})"


def private_streams():
    """The protocol's streams under numbers of their own: a print() in a reward function goes to standard error."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdin = open(os.devnull, encoding="utf-8")
    sys.stdout = sys.stderr
    return requests, answers


def end_with(parent):
    """Ends this process and all it started when the trainer is gone, be it in the midst of a reward function."""

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def answer(request, tokenizer, rewards):
    op = request.get("op")
    if op == "load":
        tokenizer.load(request["model"])
        return {}
    if op == "encode":
        return {"ids": tokenizer.encode(request["prompt"])}
    if op == "decode":
        return {"texts": tokenizer.decode(request["ids"], request["skip_special_tokens"])}
    if op == "prepare":
        rewards.get(request["function"])
        return {}
    if op == "reward":
        names = ("function", "prompts", "completions", "completion_ids", "columns")
        return {"rewards": rewards.call(*(request[name] for name in names))}
    if op == "prepare_prompts":
        from longstraw.prepare import prepare

        return prepare(request["file"], request["out"], request["model"], tokenizer=tokenizer)
    raise Failure("config", f"unknown request {op!r}")


def main(parent=None, import_early=False):
    requests, answers = private_streams()
    end_with(parent or os.getppid())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a reward function may fork
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    tokenizer, rewards = Tokenizer(), Rewards()
    if import_early:
        tokenizer.import_early()
    for line in requests:
        request = json.loads(line)
        if request.get("op") == "quit":
            break
        try:
            result = answer(request, tokenizer, rewards)
        except Failure as failure:
            result = {"error": str(failure).encode("utf-8", "replace").decode(), "kind": failure.kind}
        sys.stderr.flush()
        answers.write(json.dumps({"id": request["id"], **result}, allow_nan=False) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
