#!/usr/bin/env python3
"""Whole GRPO steps by TRL's own trainer on CPU: sampling with transformers' generate, loss, backward, clipping, AdamW.

A process of its own. The prompt is given as token ids and responses are forced to their full length, so that both programs do
the same work; nothing else of the trainer is touched. Prints one line of JSON: seconds of each step and of its sampling, and
the tokens that ran forward through the model, counted at its embedding.
"""
import argparse
import json
import pathlib
import tempfile
import time

import torch


def settings(options, folder):
    from trl import GRPOConfig
    return GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        max_steps=options.steps, learning_rate=options.learning_rate, lr_scheduler_type="constant", beta=0.0, loss_type="grpo",
        num_generations=options.group, per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.group // options.batch, max_completion_length=options.response_tokens,
        generation_kwargs={"min_new_tokens": options.response_tokens}, gradient_checkpointing=options.checkpointing,
        model_init_kwargs={"dtype": "float32", "attn_implementation": options.attention})


class Clock:
    """Seconds of each step, from before its sampling to after its optimizer's update, and tokens run forward."""

    def __init__(self, trainer, prompt):
        from transformers import TrainerCallback
        clock = self
        self.steps, self.sampling = [], []
        self.phase = "loss"

        class Callback(TrainerCallback):
            def on_step_begin(self, *arguments, **more):
                clock.begin = time.perf_counter()
                clock.counts = {"sampling": 0, "loss": 0}

            def on_step_end(self, *arguments, **more):
                clock.steps.append(time.perf_counter() - clock.begin)

        trainer.add_callback(Callback())
        sample = trainer._generate

        def timed(prompts):
            start, clock.phase = time.perf_counter(), "sampling"
            made = sample(prompts)
            clock.phase = "loss"
            clock.sampling.append(time.perf_counter() - start)
            return made

        def count(module, arguments, output):
            ids = arguments[0]
            # A prompt runs whole or not at all; a token drawn after it runs alone.
            if ids.shape[1] >= len(prompt):
                clock.counts[clock.phase] += ids.shape[0] * len(prompt)

        trainer._generate = timed
        trainer.model.get_input_embeddings().register_forward_hook(count)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--prompt", type=pathlib.Path, required=True, help="JSON list of token ids")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--response-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="responses whose graph exists at once")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    options = parser.parse_args()

    import transformers
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer
    import trl
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    prompt = json.loads(options.prompt.read_text())
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(options.model), args=settings(options, folder), processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": ["the prompt's ids are given"] * options.group}),
            reward_funcs=lambda completion_ids, **columns: [sum(ids) % 7 / 7 for ids in completion_ids])
        trainer._tokenize_prompts = lambda prompts: ([prompt] * len(prompts), None, {})
        clock = Clock(trainer, prompt)
        trainer.train()
        lengths = {log["completions/mean_length"] for log in trainer.state.log_history if "completions/mean_length" in log}
    if lengths != {float(options.response_tokens)}:
        raise SystemExit(f"trl_train: responses of {lengths} tokens, wanted {options.response_tokens}")
    print(json.dumps({"seconds": clock.steps, "sampling_seconds": clock.sampling, "prompt_tokens_forward": clock.counts,
                      "trl": trl.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
