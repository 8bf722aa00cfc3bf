"""Reward programs for the tests, which speak JSON lines: a good one, and one for each way to go wrong."""

import json
import os
import sys
import time


def answered(request, way, calls):
    """What is written for the request, without the newline."""
    count = len(request["completions"])
    lengths = [float(len(text)) for text in request["completions"]]
    if way == "no id":
        return json.dumps({"rewards": lengths})
    if way == "seen":
        assert request["prompts"] == ["p"] * count, request
        assert request["columns"] == {"answer": [4] * count}, request
        assert request["completion_ids"] == [[i] for i in range(count)], request
        return json.dumps({"id": request["id"], "rewards": [1] * count})
    if way == "missing":
        return json.dumps({"id": request["id"], "rewards": [None] * count})
    if way == "error":
        return json.dumps({"id": request["id"], "error": "no opinion today"})
    if way == "too few":
        return json.dumps({"id": request["id"], "rewards": lengths[1:]})
    if way == "nan":
        return json.dumps({"id": request["id"], "rewards": [float("nan")] * count})
    if way == "text":
        return json.dumps({"id": request["id"], "rewards": ["1"] * count})
    if way == "rubbish":
        return "Hello, world"
    if way == "other id":
        return json.dumps({"id": request["id"] + 1, "rewards": lengths})
    if way == "dies on the second call" and calls == 2:
        sys.stderr.write("out of ideas\n")
        os._exit(9)
    if way == "hangs on the second call" and calls == 2:
        time.sleep(1000)
    return json.dumps({"id": request["id"], "rewards": lengths})


def main(way):
    for calls, line in enumerate(sys.stdin, 1):
        print(answered(json.loads(line), way, calls), flush=True)


main(" ".join(sys.argv[1:]))
