"""Reward functions for the tests: good ones, and one for each way to go wrong."""

import asyncio
import math
import multiprocessing
import os
import subprocess
import sys
import time

CALLS = []


def length(prompts, completions, completion_ids, **columns):
    return [float(len(text)) for text in completions]


def seen(prompts, completions, completion_ids, answer, weight, **columns):
    """1 for each completion when everything arrives as TRL would give it."""
    assert prompts == ["p", "p", [{"role": "user", "content": "q"}]], prompts
    assert completions == ["a", "bb", [{"role": "assistant", "content": "ccc"}]], completions
    assert completion_ids == [[1], [2, 2], [3, 3, 3]], completion_ids
    assert answer == [4, 4, {"x": None}], answer
    assert weight == [0.5, 0.5, None], weight
    assert not columns, columns
    return [1.0] * 3


def some_missing(prompts, completions, completion_ids, **columns):
    return [None if i % 2 else True for i in range(len(completions))]


def prints(prompts, completions, completion_ids, **columns):
    print('{"id": 1, "rewards": [9]}')
    sys.stdout.flush()
    os.write(1, b'{"id": 2, "rewards": [9]}\n')
    subprocess.run(["echo", '{"id": 3, "rewards": [9]}'], check=True)
    sys.stdin.read()
    return [1.0] * len(completions)


async def is_async(prompts, completions, completion_ids, **columns):
    await asyncio.sleep(0)
    return [2.0] * len(completions)


def raises(prompts, completions, completion_ids, **columns):
    return [inner(text) for text in completions]


def inner(text):
    return 1 / 0  # the line that the message must name


def exits(prompts, completions, completion_ids, **columns):
    sys.exit("enough")


def dies(prompts, completions, completion_ids, **columns):
    print("going down")
    sys.stdout.flush()
    os._exit(7)


def aborts(prompts, completions, completion_ids, **columns):
    os.abort()


def hangs(prompts, completions, completion_ids, **columns):
    print(f"child {subprocess.Popen(['sleep', '1000']).pid}")
    sys.stdout.flush()
    time.sleep(1000)


def dies_but_leaves_a_child(prompts, completions, completion_ids, **columns):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
    os._exit(3)


def too_few(prompts, completions, completion_ids, **columns):
    return [1.0] * (len(completions) - 1)


def too_many(prompts, completions, completion_ids, **columns):
    return [1.0] * (len(completions) + 1)


def no_list(prompts, completions, completion_ids, **columns):
    return 1.0


def returns_nothing(prompts, completions, completion_ids, **columns):
    CALLS.append(completions)


def no_number(prompts, completions, completion_ids, **columns):
    return [1.0] + ["good"] * (len(completions) - 1)


def not_a_number(prompts, completions, completion_ids, **columns):
    return [1.0] + [math.nan] * (len(completions) - 1)


def infinite(prompts, completions, completion_ids, **columns):
    return [-math.inf] * len(completions)


def too_large(prompts, completions, completion_ids, **columns):
    return [10**400] * len(completions)


def takes_no_columns(prompts, completions, completion_ids):
    return [1.0] * len(completions)


no_function = 3


def counts_calls(prompts, completions, completion_ids, **columns):
    """How often this process has called it."""
    CALLS.append(completions)
    return [float(len(CALLS))] * len(completions)
