"""The client of a sampling server, against real HTTP servers that answer as vLLM and SGLang do, or fail in every way."""
import contextlib
import http.server
import json
import threading
import time

import pytest

from longstraw import server as module
from longstraw.server import Server
from longstraw.worker import Failure

ASKED = {"prompt_ids": [1, 2, 3], "n": 2, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 0, "seed": 7, "stop_token_ids": [2]}
WANTED = [{"ids": [5, 2], "logprobs": [-0.5, -1.5], "truncated": False}, {"ids": [6, 7, 8, 9], "logprobs": [-1.0, -2.0, -3.0, -4.0], "truncated": True}]
FINISHES = ["stop", "length"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, dict(self.headers)))
        self.server.answer(self, body)

    def say(self, value, status=200):
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(*answers):
    """A server that answers one after the other, the last for ever; an answer is a value, (status, value) or a function."""
    left = list(answers)

    def answer(handler, body):
        now = left.pop(0) if len(left) > 1 else left[0]
        if callable(now):
            now(handler, body)
        elif isinstance(now, tuple):
            handler.say(now[1], now[0])
        else:
            handler.say(now)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.answer, server.daemon_threads = [], answer, True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def client(server, path="", timeout=20.0, retries=0, reload_path="/update_weights_from_disk"):
    return Server(f"http://127.0.0.1:{server.server_address[1]}{path}", "policy", timeout, retries, reload_path)


def vllm(**change):
    return {"id": "x", "choices": [
        {"index": i, "text": "t", "finish_reason": FINISHES[i], "token_ids": one["ids"],
         "logprobs": {"tokens": ["t"] * len(one["ids"]), "token_logprobs": one["logprobs"], "top_logprobs": None}, **change}
        for i, one in enumerate(WANTED)]}


def vllm_tokens_as_ids():
    answer = vllm()
    for choice in answer["choices"]:
        choice["logprobs"]["tokens"] = [f"token_id:{i}" for i in choice.pop("token_ids")]
    return answer


def sglang_openai():
    answer = vllm()
    for choice in answer["choices"]:
        choice["response_token_ids"] = choice.pop("token_ids")
    return answer


def sglang_meta():
    return {"choices": [
        {"index": i, "text": "t", "finish_reason": FINISHES[i], "logprobs": None,
         "meta_info": {"output_token_logprobs": [[p, t, None] for p, t in zip(one["logprobs"], one["ids"])]}}
        for i, one in enumerate(WANTED)]}


def sglang_native():
    return [{"text": "t", "output_ids": one["ids"],
             "meta_info": {"finish_reason": {"type": FINISHES[i], "length": 4},
                           "output_token_logprobs": [[p, t, None] for p, t in zip(one["logprobs"], one["ids"])]}}
            for i, one in enumerate(WANTED)]


@pytest.mark.parametrize("path, answer", [
    ("", vllm()), ("/v1", vllm()), ("/v1/", vllm_tokens_as_ids()), ("", sglang_openai()), ("", sglang_meta()), ("/generate", sglang_native()),
    ("", {"choices": vllm()["choices"][::-1]}),
], ids=["vllm", "address with /v1", "vllm, tokens as ids", "sglang", "sglang, meta_info", "sglang, native", "in another order"])
def test_answers_of_every_shape_are_read(path, answer):
    with serving(answer) as server:
        assert client(server, path).sample(**ASKED) == WANTED


def test_the_request_says_all_that_a_server_would_otherwise_choose_itself(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "word")
    with serving(vllm()) as server:
        client(server).sample(**ASKED)
        path, body, headers = server.seen[0]
    assert path == "/v1/completions" and headers["Authorization"] == "Bearer word"
    assert body == {"model": "policy", "prompt": [1, 2, 3], "n": 2, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0,
                    "repetition_penalty": 1.0, "seed": 7, "stop_token_ids": [2], "logprobs": 1, "return_token_ids": True, "stream": False}
    with serving(sglang_native()) as server:
        client(server, "/generate").sample(**{**ASKED, "top_k": 5})
        path, body, _ = server.seen[0]
    assert path == "/generate" and body["input_ids"] == [1, 2, 3] and body["return_logprob"] is True
    assert body["sampling_params"] == {"n": 2, "max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.0,
                                       "repetition_penalty": 1.0, "sampling_seed": 7, "stop_token_ids": [2]}


def test_the_likeliest_tokens_are_asked_for_once():
    with serving({"choices": vllm()["choices"][:1]}) as server:
        assert client(server).sample(**{**ASKED, "temperature": 0, "n": 3}) == WANTED[:1] * 3
        assert [body["n"] for _, body, _ in server.seen] == [1]


def test_a_native_answer_for_one_completion_is_no_list():
    with serving(sglang_native()[0]) as server:
        assert client(server, "/generate").sample(**{**ASKED, "n": 1}) == WANTED[:1]


def refused(answers, retries=2, kind="server", **options):
    with serving(*answers) as server:
        with pytest.raises(Failure) as failure:
            client(server, retries=retries, **options).sample(**ASKED)
        assert failure.value.kind == kind
        return str(failure.value), len(server.seen)


def vanish(handler, body):
    handler.connection.close()


def half(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.close()


def slow(handler, body):
    threading.Event().wait(3)


def trickling(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(100):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            threading.Event().wait(0.1)


@pytest.mark.parametrize("answer, message", [
    ((500, {"error": "out of memory"}), 'answered with status 500: {"error": "out of memory"}'),
    ((503, b""), "answered with status 503: nothing"),
    ((429, b"later"), "answered with status 429: later"),
    (b"<html>hello</html>", "answered with '<html>hello</html>', which is no JSON"),
    ([1, 2], "answered with [1, 2], wanted choices"),
    ({"choices": "none"}, "wanted choices"),
    ({"choices": vllm()["choices"][:1]}, "answered with 1 completions, wanted 2"),
    ({"choices": [1, 2]}, "choice 0 is no object"),
    (vllm(logprobs={"token_logprobs": "none"}), "choice 0 has 2 tokens and no list of log-probs"),
    (vllm(token_ids=[]), "choice 0 has 0 tokens, wanted 1 to 4"),
    (vllm(token_ids=[1] * 5), "choice 0 has 5 tokens, wanted 1 to 4"),
    (vllm(token_ids=[1, -2]), "choice 0: its token ids are no token ids"),
    (vllm(logprobs={"token_logprobs": [-1.0]}), "choice 0 has 2 tokens and 1 log-probs"),
    (vllm(logprobs={"token_logprobs": [None, -1.0]}), "choice 0: log-prob 0 is null, wanted a finite number"),
    (vllm(logprobs={"token_logprobs": [float("-inf"), -1.0]}), "choice 0: log-prob 0 is -Infinity, wanted a finite number"),
    (vanish, "can't be reached, or went away"),
    (half, "can't be reached, or went away"),
])
def test_what_may_pass_is_asked_again_and_then_reported_with_what_was_asked_and_answered(answer, message):
    text, asked = refused([answer])
    assert message in text and asked == 3
    assert "POST /v1/completions with 3 prompt tokens, n 2, max_tokens 4" in text and text.endswith("(asked 3 times)")


@pytest.mark.parametrize("answer", [(500, b"x"), b"rubbish", vanish, half])
def test_a_server_that_recovers_is_forgiven(answer):
    with serving(answer, answer, vllm()) as server:
        assert client(server, retries=2).sample(**ASKED) == WANTED
        assert len(server.seen) == 3


def test_what_does_not_pass_is_not_asked_again():
    text, asked = refused([(400, {"message": "prompt too long"})])
    assert "answered with status 400" in text and "prompt too long" in text and asked == 1
    text, asked = refused([{"choices": [{"text": "a", "index": i, "logprobs": {"token_logprobs": [-1.0]}} for i in range(2)]}], kind="config")
    assert "returns no token ids, and its text can't be tokenized back exactly" in text and asked == 1
    for logprobs in (None, [], "x"):
        text, asked = refused([vllm(logprobs=logprobs)], kind="config")
        assert "returns no log-probs" in text and asked == 1
    text, asked = refused([{"choices": [{"meta_info": 3, "logprobs": {"tokens": ["token_id:x"]}}] * 2}], kind="config")
    assert "returns no token ids" in text


@pytest.mark.parametrize("answer", [slow, trickling])
def test_a_slow_server_is_given_its_time_and_no_more(answer):
    begin = time.monotonic()
    text, asked = refused([answer], retries=1, timeout=0.3)
    assert "within 0.3 s" in text and asked == 2
    assert 0.6 <= time.monotonic() - begin < 30


def test_a_server_that_is_not_there():
    with serving(vllm()) as server:
        gone = client(server, retries=1)
    with pytest.raises(Failure, match="can't be reached, or went away: ConnectError") as failure:
        gone.sample(**ASKED)
    assert failure.value.kind == "server"


@pytest.mark.parametrize("url", ["localhost", "ftp://x", "http://", "http://x:port", ""])
def test_an_address_that_is_none_is_a_fault_of_the_configuration(url):
    with pytest.raises(Failure, match="rollout.server.url: got ") as failure:
        Server(url, "policy", 1.0, 0, "/reload")
    assert failure.value.kind == "config"


def test_weights_are_handed_over_by_the_name_of_their_folder():
    with serving({"success": True, "message": "done"}) as server:
        client(server, "/v1").reload("/shared/step-4")
        assert server.seen[0][:2] == ("/update_weights_from_disk", {"model_path": "/shared/step-4"})
    for content in (b"", b"ok", {"status": "fine"}):
        with serving((200, content)) as server:
            client(server, reload_path="/own").reload("/shared/step-4")
            assert server.seen[0][0] == "/own"


def test_weights_that_are_not_taken_are_an_error():
    with serving({"success": False, "message": "size mismatch"}) as server:
        with pytest.raises(Failure, match="with the weights in /w: did not take the weights: size mismatch"):
            client(server, retries=1).reload("/w")
        assert len(server.seen) == 2
    with serving((404, b"no such path")) as server:
        with pytest.raises(Failure, match="answered with status 404: no such path"):
            client(server, retries=1).reload("/w")
        assert len(server.seen) == 1
