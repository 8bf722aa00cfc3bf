"""A server that samples from a checkpoint with transformers and answers as vLLM does, or fails in a way that has a name.

    sampling_server.py MODEL DTYPE

Lines on its standard input, each answered with a line of JSON: `port`; `asked`, all that it was asked since the last reset;
`reset WAY`, which loads MODEL again and has it fail that way, or, without a way, not at all.
"""

import http.server
import json
import pathlib
import sys
import threading
import time

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "fixtures"))
import hf_oracle as oracle  # noqa: E402


class Engine:
    def __init__(self, model, dtype):
        self.dtype = getattr(torch, dtype)
        self.load(model)

    def load(self, folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype, attn_implementation="eager", local_files_only=True)
        with oracle.precision(self.dtype):
            self.model = oracle.prepare(model.eval())

    @torch.no_grad()
    def sample(self, prompt, n, max_tokens, temperature, seed, stop_token_ids):
        """Token by token over the whole sequence: no cache that could hide a fault."""
        torch.manual_seed(seed)
        choices = []
        for index in range(n):
            ids, logprobs = [], []
            while len(ids) < max_tokens and not (ids and ids[-1] in stop_token_ids):
                with oracle.precision(self.dtype):
                    logits = self.model(torch.tensor([prompt + ids])).logits[0, -1].double()
                scores = torch.log_softmax(logits / (temperature or 1.0), -1)
                ids.append(int(torch.multinomial(scores.exp(), 1)) if temperature else int(logits.argmax()))
                logprobs.append(float(scores[ids[-1]]))
            reason = "stop" if ids[-1] in stop_token_ids else "length"
            choices.append({"index": index, "text": "", "token_ids": ids, "finish_reason": reason,
                            "logprobs": {"tokens": [str(i) for i in ids], "token_logprobs": logprobs}})
        return choices


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append({"path": self.path, **{key: body[key] for key in ("model_path", "n", "seed") if key in body}})
        if self.path == "/update_weights_from_disk":
            server.engine.load(body["model_path"])
            return self.say({"success": True, "message": "Succeeded"})
        if server.way == "slow":
            time.sleep(1000)
        if server.way == "rubbish":
            return self.say("Hello")
        completions = sum(request["path"] == "/v1/completions" for request in server.seen)
        if server.way == "dies after two requests" and completions > 2:
            return self.connection.close()
        if server.way == "busy at first" and len(server.seen) <= 2:
            return self.say({"error": "busy"}, 503)
        names = ("prompt", "n", "max_tokens", "temperature", "seed", "stop_token_ids")
        choices = server.engine.sample(*(body[name] for name in names))
        if server.way == "no ids":
            for choice in choices:
                del choice["token_ids"]
        if server.way == "another model":
            choices[0]["token_ids"][0] = 10**6
        self.say({"choices": choices})

    def say(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


def main(model, dtype):
    torch.set_num_threads(1)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.engine, server.way, server.seen, server.daemon_threads = Engine(model, dtype), "", [], True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for line in sys.stdin:
        command, _, way = line.strip().partition(" ")
        answer = server.seen
        if command == "port":
            answer = server.server_address[1]
        if command == "reset":
            server.engine.load(model)
            server.way, server.seen, answer = way, [], None
        print(json.dumps(answer), flush=True)


main(*sys.argv[1:])
