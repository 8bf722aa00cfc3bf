"""What the benchmarks share: a batch of real text, runs of the program, FLOPs, tables."""
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
ARMS = ("reference", "detached", "tail", "exact")


def build_folder():
    return pathlib.Path(os.environ.get("LONGSTRAW_BUILD", ROOT / "build" / "release"))


def default_model():
    cache = pathlib.Path(os.environ.get("LONGSTRAW_CACHE", ROOT / ".cache"))
    return cache / "smollm2-135m-instruct"


def add_common_options(parser, prompt_tokens, group, response_tokens):
    parser.add_argument("--model", type=pathlib.Path, default=default_model(), help="checkpoint folder (default: the converted SmolLM2)")
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens)
    parser.add_argument("--group", type=int, default=group, help="responses")
    parser.add_argument("--response-tokens", type=int, default=response_tokens)
    parser.add_argument("--segment-tokens", type=int, default=2048)
    parser.add_argument("--replay-batch", type=int, default=0, help="responses replayed together; 0: the whole group")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder for the results")


def say(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------- batch

def document():
    """The text of examples/verify, without the questions."""
    line = (ROOT / "examples" / "verify" / "prompts.jsonl").read_text().splitlines()[0]
    return json.loads(line)["prompt"][0]["content"].rsplit("\n\nQuestion:", 1)[0]


def text_ids(model, count):
    """`count` token ids of English prose, the document as often as it takes; congruential ids where there is no tokenizer."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    if not (model / "tokenizer.json").exists():
        say(f"{model.name} has no tokenizer: ids are not those of a text")
        return [(7 * i * i + 5 * i + 3) % (vocabulary - 2) + 2 for i in range(count)]
    from transformers import AutoTokenizer
    once = AutoTokenizer.from_pretrained(model, local_files_only=True)(document())["input_ids"]
    return (once * (count // len(once) + 1))[:count]


def make_batch(model, prompt_tokens, group, response_tokens):
    """A prompt, responses that go on in the text from different places, and fixed advantages that sum to zero."""
    ids = text_ids(model, prompt_tokens + 37 * group + response_tokens)
    prompt = ids[:prompt_tokens]
    responses = [ids[prompt_tokens + 37 * i:][:response_tokens] for i in range(group)]
    advantages = [2.0 * i / (group - 1) - 1.0 for i in range(group)] if group > 1 else [1.0]
    return prompt, responses, advantages


def write_rollouts(path, batch):
    prompt, responses, advantages = batch
    with open(path, "w") as file:
        for completion, advantage in zip(responses, advantages):
            file.write(json.dumps({"prompt_id": "bench", "prompt_ids": prompt, "completion_ids": completion, "advantage": advantage}) + "\n")
    return path


# --------------------------------------------------------------------------------------------------------------- runs

def environment(threads):
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def run_arm(arm, options, rollouts, record, sets=()):
    """Runs one arm of the program; returns seconds by phase, bytes by category, and its facts."""
    keys = {"model.threads": options.threads, "longstraw.segment_tokens": options.segment_tokens,
            "longstraw.replay_batch": options.replay_batch or options.group, "reference.attention": "sdpa", **dict(sets)}
    command = [build_folder() / "bin" / "longstraw", "gradients", "--arm", arm, "--model", options.model, "--rollouts", rollouts,
               "--out", record, *[word for key, value in keys.items() for word in ("--set", f"{key}={value}")]]
    subprocess.run([str(word) for word in command], check=True, env=environment(options.threads), stdout=subprocess.DEVNULL)
    return read_record(record)


def read_record(path):
    import h5py
    with h5py.File(path) as file:
        step = file["steps/000000"]
        numbers = {name: {key: value.item() for key, value in step[name].attrs.items()} for name in ("timing", "memory", "objective")}
        return {"seconds": numbers["timing"], "bytes": numbers["memory"], "facts": numbers["objective"]}


def gradients_of(path):
    """Name -> function that reads that gradient in float64; from a record or a tensor file."""
    import h5py
    import numpy
    if path.suffix == ".h5":
        def read(name):
            with h5py.File(path) as file:
                return file["steps/000000/gradients"][name][...].astype(numpy.float64)

        with h5py.File(path) as file:
            names = list(file["steps/000000/gradients"])
    else:
        from safetensors import safe_open

        def read(name):
            with safe_open(path, "numpy") as file:
                return file.get_tensor(name).astype(numpy.float64)

        with safe_open(path, "numpy") as file:
            names = list(file.keys())
    return {name: (lambda name=name: read(name)) for name in names}


def relative_l2(reference, candidate):
    """|candidate - reference| / |reference| over all parameters."""
    import numpy
    a, b = gradients_of(reference), gradients_of(candidate)
    if a.keys() != b.keys():
        raise SystemExit(f"bench: {reference.name} and {candidate.name} hold other parameters: {sorted(a.keys() ^ b.keys())}")
    difference = norm = 0.0
    for name in a:
        right = a[name]()
        difference += float(numpy.sum((b[name]() - right) ** 2))
        norm += float(numpy.sum(right ** 2))
    return (difference / norm) ** 0.5


# -------------------------------------------------------------------------------------------------------------- FLOPs

class Flops:
    """Multiplications and additions of matrix products, the only ones counted. One token through the layers costs
    2 · (weights of the layers' matrices), a query over n keys 4 · heads · head size · n a layer (scores and values), a
    logits row 2 · D · V. Backward costs twice the forward; over keys that are constants it costs as much as the forward.
    Causal attention counts only the keys that are visible."""

    def __init__(self, config):
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        D, layers = config["hidden_size"], config["num_hidden_layers"]
        query, key_value = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        self.layer = 2 * (D * query + 2 * D * key_value + query * D + 3 * D * config["intermediate_size"])
        self.key_value_only = 2 * 2 * D * key_value   # what the last layer does for tokens whose output nobody needs
        self.layers = layers
        self.per_key = 4 * query
        self.logits = 2 * D * config["vocab_size"]

    @staticmethod
    def causal(count, past=0):
        """Pairs of query and visible key of `count` tokens behind `past` others."""
        return count * past + count * (count + 1) / 2

    def sequence(self, count):
        """Forward of a whole sequence."""
        return self.layers * (count * self.layer + self.per_key * self.causal(count))

    def state(self, count):
        """Forward of a prompt whose last layer only makes its state."""
        return (self.layers - 1) * (count * self.layer + self.per_key * self.causal(count)) + count * self.key_value_only

    def full_graph(self, P, R, G):
        return G * 3 * (self.sequence(P + R) + R * self.logits)

    def replay(self, P, R, G, keys_have_gradient):
        linear = 3 * self.layers * R * self.layer
        own = 3 * self.layers * self.per_key * self.causal(R)
        prefix = (3 if keys_have_gradient else 2) * self.layers * self.per_key * R * (P - 1)
        return G * (linear + own + prefix + 3 * R * self.logits)

    def arm(self, name, P, R, G, facts):
        """Whole step, of what the arm did: recomputed tokens count as a second forward."""
        if name in ("transformers", "reference"):
            return self.full_graph(P, R, G)
        if name == "detached":
            return self.state(P - 1) + self.replay(P, R, G, False)
        tokens = max(1, P - 1)
        recomputed = facts["recomputed_tokens"] / tokens
        swept = (facts["recomputed_tokens"] + facts["kept_tokens"]) / tokens
        return self.state(P - 1) * (1 + recomputed + 2 * swept) + self.replay(P, R, G, True)


# ------------------------------------------------------------------------------------------------------------- output

def machine(threads):
    import torch
    cpu = platform.processor() or platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        memory = int(pathlib.Path("/proc/meminfo").read_text().split()[1]) / 2 ** 20
    except (OSError, StopIteration):
        memory = None
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "memory_GiB": round(memory, 1) if memory else None,
            "torch": torch.__version__, "python": platform.python_version()}


def table(columns, rows):
    """A table in Markdown."""
    cells = [[str(cell) for cell in row] for row in [columns, *rows]]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def mebibytes(count):
    return f"{count / 2 ** 20:,.0f}"


def write_results(options, name, result, text):
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / f"{name}.md").write_text(text)
    print(text)
    say(f"written: {options.out / name}.json and .md")


def scratch():
    return tempfile.TemporaryDirectory(prefix="longstraw-bench-")
