"""The client of a running OpenAI-compatible server that samples for the trainer: vLLM, SGLang, or any that answers as they do.

It reads one JSON request a line and writes one JSON answer a line:

    {"id": 1, "op": "open", "url": URL, "model": NAME, "timeout": 600, "retries": 3, "reload_path": PATH}    -> {"id": 1}
    {"id": 2, "op": "sample", "prompt_ids": [...], "n": 8, "max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7,
     "stop_token_ids": [...]}  -> {"id": 2, "responses": [{"ids": [...], "logprobs": [...], "truncated": false}, ...]}
    {"id": 3, "op": "reload", "folder": DIR}                                                                 -> {"id": 3}
    {"op": "quit"}                                                                                           -> it ends

A request that fails is answered {"id": n, "error": message, "kind": "config" | "server"}. What is asked of the server, and which
answers are understood: docs/rollouts.md.
"""

import json
import math
import os
import random
import sys
import time

from longstraw.worker import Failure, end_with, first_line, private_streams

LARGEST_ANSWER = 1 << 30
AGAIN = (408, 425, 429)  # and every 5xx: the server may do better next time


class Refused(Exception):
    """An answer that can't be used, or none: asked again, until the retries are spent."""


def shortened(text, longest=200):
    text = " ".join(text.split())
    return text if len(text) <= longest else text[:longest] + "..."


# ---- what a choice holds, in the shapes of vLLM and SGLang


def part(value, name, kind=dict):
    """value[name] if it is of that kind, else None for a list and {} for an object."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, kind) else {} if kind is dict else None


def numbers_of_texts(tokens):
    """vLLM's return_tokens_as_token_ids: "token_id:42" in the place of the token's text."""
    prefix = "token_id:"
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) and t.startswith(prefix) for t in tokens):
        return None
    digits = [t.removeprefix(prefix) for t in tokens]
    return [int(d) for d in digits] if all(d.isdecimal() for d in digits) else None


def pairs_of(choice):
    """SGLang's [log-prob, token id, text or null] for each token."""
    pairs = part(part(choice, "meta_info"), "output_token_logprobs", list)
    return pairs if pairs is not None and all(isinstance(p, list) and len(p) >= 2 for p in pairs) else None


def ids_of(choice):
    for name in ("token_ids", "response_token_ids", "output_ids"):
        if isinstance(choice.get(name), list):
            return choice[name]
    ids = numbers_of_texts(part(choice, "logprobs").get("tokens"))
    if ids is None and pairs_of(choice) is not None:
        ids = [pair[1] for pair in pairs_of(choice)]
    return ids


def logprobs_of(choice):
    logprobs = part(choice, "logprobs").get("token_logprobs")
    if logprobs is None and pairs_of(choice) is not None:
        logprobs = [pair[0] for pair in pairs_of(choice)]
    return logprobs


def finish_of(choice):
    reason = choice.get("finish_reason") or part(choice, "meta_info").get("finish_reason")
    return reason.get("type") if isinstance(reason, dict) else reason


def response_of(choice, index, max_tokens):
    if not isinstance(choice, dict):
        raise Refused(f"choice {index} is no object")
    ids, logprobs = ids_of(choice), logprobs_of(choice)
    if ids is None:
        raise Failure(
            "config",
            "returns no token ids, and its text can't be tokenized back exactly; wanted vLLM's return_token_ids, or SGLang (its "
            "/generate has them in every version)",
        )
    if logprobs is None:
        raise Failure("config", "returns no log-probs of the sampled tokens, which the correction for another sampler needs")
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise Refused(f"choice {index}: its token ids are no token ids")
    if not 1 <= len(ids) <= max_tokens:
        raise Refused(f"choice {index} has {len(ids)} tokens, wanted 1 to {max_tokens}")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        count = len(logprobs) if isinstance(logprobs, list) else "no list of"
        raise Refused(f"choice {index} has {len(ids)} tokens and {count} log-probs")
    for at, value in enumerate(logprobs):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise Refused(f"choice {index}: log-prob {at} is {json.dumps(value)}, wanted a finite number")
    return {"ids": ids, "logprobs": logprobs, "truncated": finish_of(choice) == "length"}


# ---- the server


class Server:
    def __init__(self, url, model, timeout, retries, reload_path):
        try:
            import httpx
        except ImportError as error:
            raise Failure("config", f"{sys.executable} can't import httpx, which talks to the server: {error}") from error
        self.httpx = httpx
        self.url = url.rstrip("/")
        self.model = model
        self.timeout = timeout
        self.retries = retries
        self.reload_path = reload_path
        # SGLang's own protocol, where the address says so; else OpenAI's, with or without /v1 in the address.
        self.native = self.url.endswith("/generate")
        self.base = self.url.removesuffix("/generate").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY")
        try:
            self.client = httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else None)
            if httpx.URL(self.url).scheme not in ("http", "https") or not httpx.URL(self.url).host:
                raise ValueError("wanted http://HOST:PORT")
        except (ValueError, httpx.InvalidURL) as error:
            raise Failure("config", f"rollout.server.url: got {url}: {error}") from error

    def post_once(self, path, body):
        """The answer's JSON. Refused for anything else within the time; Failure where asking again is of no use."""
        deadline = time.monotonic() + self.timeout
        content = bytearray()
        try:
            with self.client.stream("POST", self.base + path, json=body, timeout=self.timeout) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    # httpx counts the time from byte to byte: one that trickles would never end.
                    if time.monotonic() > deadline:
                        raise Refused(f"gave no whole answer within {self.timeout:g} s")
                    if len(content) > LARGEST_ANSWER:
                        raise Refused("answered with more than 1 GiB")
                status = response.status_code
        except self.httpx.TimeoutException as error:
            raise Refused(f"gave no answer within {self.timeout:g} s ({type(error).__name__})") from error
        except (self.httpx.HTTPError, self.httpx.StreamError) as error:
            raise Refused(f"can't be reached, or went away: {first_line(error)}") from error
        text = content.decode("utf-8", "replace")
        if status >= 400:
            problem = f"answered with status {status}: {shortened(text) or 'nothing'}"
            if status >= 500 or status in AGAIN:
                raise Refused(problem)
            raise Failure("server", problem)
        try:
            return json.loads(text) if text.strip() or path != self.reload_path else {}
        except ValueError as error:
            if path == self.reload_path:
                return {}  # it took the weights; what it says of that is its own
            raise Refused(f"answered with {shortened(text)!r}, which is no JSON") from error

    def post(self, path, body, doing, read):
        """read(answer), asked again where that may help."""
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                wait = min(30.0, 2.0 ** (attempt - 1)) * random.uniform(0.75, 1.0)
                print(f"longstraw: server {self.base}, {doing}: {problem}; asking again in {wait:.1f} s", file=sys.stderr, flush=True)
                time.sleep(wait)
            try:
                return read(self.post_once(path, body))
            except Refused as refused:
                problem = str(refused)
            except Failure as failure:
                raise Failure(failure.kind, f"server {self.base}, {doing}: {failure}") from failure
        times = f" (asked {self.retries + 1} times)" if self.retries else ""
        raise Failure("server", f"server {self.base}, {doing}: {problem}{times}")

    def sample(self, prompt_ids, n, max_tokens, temperature, top_p, top_k, seed, stop_token_ids):
        # The likeliest tokens are the same for all, and vLLM refuses to find them twice.
        asked = 1 if temperature == 0 else n
        settings = {
            "n": asked,
            "temperature": temperature,
            # All of them, always: servers fill in what the checkpoint's generation_config.json says.
            "top_p": top_p,
            "top_k": top_k if top_k > 0 else -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": stop_token_ids,
        }
        if self.native:
            settings |= {"max_new_tokens": max_tokens, "sampling_seed": seed}
            path, body = "/generate", {"input_ids": prompt_ids, "sampling_params": settings, "return_logprob": True}
        else:
            path = "/v1/completions"
            body = {"model": self.model, "prompt": prompt_ids, "max_tokens": max_tokens, "seed": seed, "logprobs": 1,
                    "return_token_ids": True, "stream": False, **settings}

        def read(answer):
            if self.native:  # of one completion it is no list
                choices = [answer] if isinstance(answer, dict) else answer
            else:
                choices = part(answer, "choices", list)
            if not isinstance(choices, list):
                raise Refused(f"answered with {shortened(json.dumps(answer))}, wanted choices")
            if len(choices) != asked:
                raise Refused(f"answered with {len(choices)} completions, wanted {asked}")
            if all(isinstance(choice, dict) and isinstance(choice.get("index"), int) for choice in choices):
                choices = sorted(choices, key=lambda choice: choice["index"])
            return [response_of(choice, index, max_tokens) for index, choice in enumerate(choices)]

        doing = f"POST {path} with {len(prompt_ids)} prompt tokens, n {asked}, max_tokens {max_tokens}"
        responses = self.post(path, body, doing, read)
        return responses * (n // asked)

    def reload(self, folder):
        def read(answer):
            if isinstance(answer, dict) and answer.get("success") is False:
                raise Refused(f"did not take the weights: {shortened(str(answer.get('message', answer)))}")
            return answer

        self.post(self.reload_path, {"model_path": folder}, f"POST {self.reload_path} with the weights in {folder}", read)


def answer(request, servers):
    op = request.pop("op", None)
    if op == "open":
        servers[:] = [Server(**request)]
        return {}
    if op == "sample":
        return {"responses": servers[0].sample(**request)}
    if op == "reload":
        servers[0].reload(**request)
        return {}
    raise Failure("config", f"unknown request {op!r}")


def main(parent=None):
    requests, answers = private_streams()
    end_with(parent or os.getppid())
    servers = []
    for line in requests:
        request = json.loads(line)
        if request.get("op") == "quit":
            break
        number = request.pop("id")
        try:
            result = answer(request, servers)
        except Failure as failure:
            result = {"error": str(failure).encode("utf-8", "replace").decode(), "kind": failure.kind}
        sys.stderr.flush()
        answers.write(json.dumps({"id": number, **result}, allow_nan=False) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
