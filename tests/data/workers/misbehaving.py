"""A stand-in for the scoring process that breaks the protocol in the way its argument names."""

import json
import os
import sys
import time


def rewards(request, value):
    print(json.dumps({"id": request["id"], "rewards": value}), flush=True)


def main(way):
    if way == "dies at once":
        print("no good morning", file=sys.stderr)
        sys.exit(5)
    if way == "never reads":
        time.sleep(1000)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "prepare":
            print(json.dumps({"id": request["id"]}), flush=True)
        elif way == "rubbish":
            print("Hello, world", flush=True)
        elif way == "binary rubbish":
            os.write(1, b"\xff\xfe\x00\n")
        elif way == "wrong id":
            print(json.dumps({"id": 99, "rewards": [1]}), flush=True)
        elif way == "no rewards":
            print(json.dumps({"id": request["id"]}), flush=True)
        elif way == "too few":
            rewards(request, [])
        elif way == "text":
            rewards(request, ["1"] * len(request["completions"]))
        elif way == "half a line":
            os.write(1, b'{"id": 2, "rewa')
            sys.exit(0)
        elif way == "endless line":
            while True:
                os.write(1, b"x" * 65536)
                time.sleep(0.001)
        elif way == "closes output":
            os.close(1)
            os.close(0)
            time.sleep(1000)
        elif way == "chatters first":
            os.write(2, b"y" * 1000000)
            rewards(request, [1] * len(request["completions"]))


main(sys.argv[1])
