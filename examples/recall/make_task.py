"""Makes the recall task: prompts, held-out prompts, and the random model that every arm of a seed starts from.

    .venv/bin/python examples/recall/make_task.py out/recall --pairs 4 --warm-until 0.5 --seeds 0,1,2,3,4

A prompt lists all keys in random order, each with a random value, and ends with one of them: k3 v5 k0 v1 k2 v5 k1 v7 k0. The
right answer is the one token that followed the asked key. Nothing else tells it, so that a model must learn to read its
context. Prompts are token ids: keys from 0, values behind them.

Writes train.jsonl, eval.jsonl and model-<seed>/ (a Hugging Face Llama of 2 layers, 64 wide, with weights of variance
1/inputs). --warm-until trains it first on right answers, by transformers, with the whole gradient: every arm then
starts from a model that has begun to read.
"""

import argparse
import collections
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

LAYERS, WIDTH, HEADS, MLP = 2, 64, 4, 256


def prompts(count, pairs, values, rng):
    for _ in range(count):
        keys = rng.permutation(pairs)
        held = pairs + rng.integers(values, size=pairs)
        asked = rng.integers(pairs)
        ids = [int(token) for pair in zip(keys, held) for token in pair] + [int(keys[asked])]
        yield {"prompt_ids": ids, "answer": int(held[asked])}


def write_prompts(path, rows, taken):
    """JSONL of the rows whose prompt is not in `taken`; returns the prompts written."""
    written = set()
    with open(path, "w") as file:
        for number, row in enumerate(rows):
            key = tuple(row["prompt_ids"])
            if key in taken:
                continue
            written.add(key)
            file.write(json.dumps({"prompt_id": f"{path.stem}-{number}", **row}) + "\n")
    return written


def write_model(folder, vocab, seed):
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs, inputs):
        return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5

    weights = {"model.embed_tokens.weight": matrix(vocab, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix(WIDTH, WIDTH)
        weights[f"{prefix}mlp.gate_proj.weight"] = matrix(MLP, WIDTH)
        weights[f"{prefix}mlp.up_proj.weight"] = matrix(MLP, WIDTH)
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(WIDTH, MLP)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(WIDTH)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(WIDTH)
    weights["model.norm.weight"] = torch.ones(WIDTH)
    weights["lm_head.weight"] = matrix(vocab, WIDTH)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def warm_up(folder, target, pairs, values, seed, batch=32, learning_rate=1e-3, most_steps=1000):
    """Supervised steps on right answers until `target` of the last 320 would have been right. Prompts of their own: none of the
    training file's order is spent."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rows = prompts(most_steps * batch, pairs, values, np.random.default_rng([seed, pairs]))
    right = collections.deque(maxlen=10)
    for step in range(1, most_steps + 1):
        chosen = [next(rows) for _ in range(batch)]
        answers = torch.tensor([row["answer"] for row in chosen])
        logits = model(torch.tensor([row["prompt_ids"] for row in chosen])).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right.append((logits.argmax(-1) == answers).double().mean().item())
        if len(right) == right.maxlen and sum(right) / len(right) >= target:
            break
    else:
        raise RuntimeError(f"{folder}: after {most_steps} supervised steps only {sum(right) / len(right):.2f} are right")
    weights = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{folder}: {step} supervised steps", file=sys.stderr)


def make(folder, pairs, seeds, warm_until=0.0, values=8, train=25600, held_out=512):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(pairs)
    kept = write_prompts(folder / "eval.jsonl", prompts(held_out, pairs, values, rng), set())
    write_prompts(folder / "train.jsonl", prompts(train, pairs, values, rng), kept)
    for seed in seeds:
        model = folder / f"model-{seed}"
        write_model(model, pairs + values, seed)
        if warm_until > 0:
            warm_up(model, warm_until, pairs, values, seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=4, help="keys, each of them listed with a value")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--warm-until", type=float, default=0.0, help="share of right answers that supervised steps reach before")
    args = parser.parse_args()
    make(args.folder, args.pairs, [int(seed) for seed in args.seeds.split(",")], args.warm_until)


if __name__ == "__main__":
    main()
