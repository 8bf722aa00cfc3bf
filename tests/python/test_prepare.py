"""Preparing data sets: token ids are the tokenizer's own, and what can't be used is named with file, row, column and value."""
import datetime
import errno
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT

from longstraw import prepare as module
from longstraw.prepare import prepare
from longstraw.worker import Failure

WORDS = ROOT / "tests/data/tokenizer"
SMOLLM2 = ROOT / ".cache/smollm2-135m-instruct"
CHAT = [{"role": "user", "content": "what is two plus two ?"}]
ROWS = [
    {"prompt": "what is two plus two ?", "answer": "four"},
    {"prompt": CHAT, "answer": "Grüße"},
    {"prompt": CHAT + [{"role": "assistant", "content": "the answer is"}], "answer": None},
    {"prompt": [{"role": "system", "content": "Be brief."}] + CHAT, "answer": {"nested": [1, 2.5]}},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prepared(tmp_path, rows, model=WORDS, **options):
    out = tmp_path / "out.jsonl"
    prepare(str(write(tmp_path / "p.jsonl", rows)), str(out), str(model), **options)
    return read(out)


def refused(tmp_path, content, kind="input", name="p.jsonl", **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Failure) as failure:
        prepare(str(path), str(tmp_path / "out.jsonl"), **{"model": str(WORDS), **options})
    assert failure.value.kind == kind
    assert sorted(path.name for path in tmp_path.iterdir()) == [name], "something is left behind"
    return str(failure.value).replace(str(tmp_path) + "/", "")


def asked(tokenizer, prompt):
    """What TRL would give the model."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    goes_on = prompt[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=not goes_on, continue_final_message=goes_on, return_dict=False)


@pytest.mark.parametrize("model, processes", [(WORDS, 1), (WORDS, 2), (SMOLLM2, 1)], ids=["words", "words in 2 processes", "smollm2"])
def test_ids_are_those_of_the_tokenizer_and_its_chat_template(tmp_path, model, processes):
    transformers = pytest.importorskip("transformers")
    if not model.is_dir():
        pytest.skip("no SmolLM2 here")
    rows = ROWS if model == SMOLLM2 else ROWS[:3]  # the small template knows no system message
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    done = prepared(tmp_path, rows, model, num_proc=processes)
    assert [row["prompt_ids"] for row in done] == [list(asked(tokenizer, row["prompt"])) for row in rows]
    assert [row["prompt_id"] for row in done] == ["1", "2", "3", "4"][:len(rows)]
    assert [{key: row[key] for key in ("prompt", "answer")} for row in done] == rows


def test_arguments_of_the_template_reach_it(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in WORDS.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "chat_template.jinja").write_text("{% if brief %}four{% else %}what is{% endif %}")
    assert prepared(tmp_path, [{"prompt": CHAT}], model)[0]["prompt_ids"] == [5, 6]
    assert prepared(tmp_path, [{"prompt": CHAT}], model, chat_template_kwargs={"brief": True})[0]["prompt_ids"] == [10]


def test_ids_that_are_given_are_kept_and_need_no_tokenizer(tmp_path):
    rows = [{"prompt_id": "a", "prompt_ids": [7, 8], "x": 1}, {"prompt_id": 3, "prompt": "said", "prompt_ids": [9]}]
    assert prepared(tmp_path, rows, model="") == [rows[0], {**rows[1], "prompt_id": "3"}]


def test_parquet_gives_what_jsonl_gives(tmp_path):
    rows = [{"prompt": row["prompt"], "answer": str(row["answer"]), "n": n} for n, row in enumerate(ROWS[1:3])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    prepare(str(tmp_path / "p.parquet"), str(tmp_path / "q.jsonl"), str(WORDS))
    assert read(tmp_path / "q.jsonl") == prepared(tmp_path, rows)
    texts = [{"prompt": f"what is {'two ' * n}", "column": n} for n in range(200)]  # more than one batch of rows
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), tmp_path / "p.parquet", row_group_size=50)
    prepare(str(tmp_path / "p.parquet"), str(tmp_path / "q.jsonl"), str(WORDS))
    assert read(tmp_path / "q.jsonl") == prepared(tmp_path, texts)


def test_long_prompts_are_an_error_or_cut_on_the_left_or_skipped(tmp_path):
    rows = [{"prompt": "what is"}, {"prompt": "what is two plus two ?"}]
    path, out = str(write(tmp_path / "p.jsonl", rows)), str(tmp_path / "out.jsonl")
    options = {"model": str(WORDS), "max_prompt_length": 4}
    assert prepare(path, out, **options, long_prompt="left_truncate") == {
        "prompts": 2, "tokens": {"min": 3, "mean": 3.5, "max": 4}, "skipped": 0, "truncated": 1}
    assert [row["prompt_ids"] for row in read(tmp_path / "out.jsonl")] == [[1, 5, 6], [7, 8, 7, 9]]
    assert prepare(path, out, **options, long_prompt="skip") == {
        "prompts": 1, "tokens": {"min": 3, "mean": 3.0, "max": 3}, "skipped": 1, "truncated": 0}
    with pytest.raises(Failure, match=r"p.jsonl:2: prompt: has 7 tokens, wanted at most 4 \(left_truncate or skip"):
        prepare(path, out, **options)
    assert [row["prompt_id"] for row in read(tmp_path / "out.jsonl")] == ["1"], "what was there is lost"
    with pytest.raises(Failure, match="p.jsonl: every prompt has more than 2 tokens, none is left"):
        prepare(path, out, model=str(WORDS), max_prompt_length=2, long_prompt="skip")


@pytest.mark.parametrize("content, message", [
    ("", "p.jsonl: is empty, wanted at least one row with a prompt"),
    ("\n \n", "p.jsonl: is empty, wanted at least one row with a prompt"),
    ('{"prompt": "what"}\n{"prompt": ""}', 'p.jsonl:2: prompt: got "", wanted a text or a list of chat messages, not empty'),
    ('{"prompt": 3}', "p.jsonl:1: prompt: got 3, wanted a text"),
    ('{"messages": []}', "p.jsonl:1: prompt: is missing, wanted a text, a list of chat messages, or prompt_ids; did you mean prompt by messages?"),
    ('{"promt": "x"}', "did you mean prompt by promt?"),
    ('{"answer": "x"}', "p.jsonl:1: prompt: is missing"),
    ('{"prompt": ["x"]}', 'p.jsonl:1: prompt[0]: got "x", wanted a chat message'),
    ('{"prompt": [{"role": "user"}]}', "p.jsonl:1: prompt[0]: has no content"),
    ('{"prompt": [{"role": 1, "content": "x"}]}', "p.jsonl:1: prompt[0].role: got 1, wanted a text"),
    ('{"prompt": [{"role": "pirate", "content": "x"}]}', "p.jsonl:1: prompt: the chat template of"),
    ('{"prompt_ids": []}', "p.jsonl:1: prompt_ids: got a list of 0, wanted a list of at least one token id"),
    ('{"prompt_ids": [1, -2]}', "p.jsonl:1: prompt_ids[1]: got -2, wanted a token id from 0"),
    ('{"prompt_ids": [1, true]}', "p.jsonl:1: prompt_ids[1]: got true"),
    ('{"prompt_id": "a", "prompt": "what"}\n{"prompt_id": "a", "prompt": "is"}', 'p.jsonl:2: prompt_id: got "a", which p.jsonl:1 has already'),
    ('{"prompt_id": 2, "prompt": "what"}\n{"prompt": "is"}', 'p.jsonl:2: prompt_id: got "2", which'),
    ('{"prompt_id": "", "prompt": "what"}', 'p.jsonl:1: prompt_id: got "", wanted'),
    ('{"prompt": "what", "completions": 1}', "p.jsonl:1: completions: is a name that reward functions are called with"),
    ('{"prompt": "what", "x": NaN}', "p.jsonl:1: got NaN, which is not JSON"),
    ('{"prompt": "what", "prompt": "is"}', "p.jsonl:1: prompt: the column occurs twice"),
    ('{"prompt": "what"}\n{"prompt": "wh', "p.jsonl:2: not JSON at character 12"),
    ("[1]", "p.jsonl:1: got a list of 1, wanted a JSON object"),
    (b'{"prompt": "\xff"}', "p.jsonl:1: not UTF-8 at byte 13"),
    ("[" * 100000, "p.jsonl:1: RecursionError"),
])
def test_jsonl_that_cannot_be_used_is_refused_with_its_place(tmp_path, content, message):
    assert message in refused(tmp_path, content)


def test_a_prompt_without_a_token_is_refused(tmp_path):
    for file in WORDS.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None  # which would add a token
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    write(tmp_path / "p.jsonl", [{"prompt": " "}])
    with pytest.raises(Failure, match='p.jsonl:1: prompt: got " ", which has no token'):
        prepare(str(tmp_path / "p.jsonl"), str(tmp_path / "out.jsonl"), str(tmp_path))


def test_checkpoints_that_cannot_tokenize_are_refused(tmp_path):
    assert "p.jsonl:1: prompt: is a text, and there is no checkpoint" in refused(tmp_path, '{"prompt": "x"}', model="")
    assert "no such folder" in refused(tmp_path, '{"prompt": "x"}', model="/no/such/folder")
    assert "its tokenizer can't be loaded" in refused(tmp_path, '{"prompt": "x"}', model=str(tmp_path))


def parquet_bytes(tmp_path, table):
    pyarrow.parquet.write_table(table, tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    (tmp_path / "x").unlink()
    return content


def test_parquet_that_cannot_be_used_is_refused_with_row_column_and_value(tmp_path):
    def table(**columns):
        return parquet_bytes(tmp_path, pyarrow.table(columns))

    def says(content):
        return refused(tmp_path, content, name="p.parquet")

    whole = table(prompt=["what is"] * 5000, n=list(range(5000)))
    assert "p.parquet: is no usable Parquet file" in says(b"")
    assert "p.parquet: is no usable Parquet file" in says(b"no Parquet at all")
    assert "p.parquet: is no usable Parquet file" in says(whole[: len(whole) // 2])
    broken = bytearray(whole)
    broken[4:200] = bytes(196)
    assert "p.parquet: is no usable Parquet file" in says(bytes(broken))
    assert "p.parquet: is empty" in says(table(prompt=pyarrow.array([], pyarrow.string())))
    assert "p.parquet: row 1: prompt: is missing" in says(table(text=["x"]))
    assert "p.parquet: row 2: prompt: is missing" in says(table(prompt=["what", None]))
    assert "p.parquet: row 2: when: got datetime.date(2026, 1, 2) (date), wanted what JSON can hold" in says(
        table(prompt=["what", "is"], when=[None, datetime.date(2026, 1, 2)]))
    assert "p.parquet: row 1: weight: got nan, wanted a finite number" in says(table(prompt=["what"], weight=[float("nan")]))
    assert "p.parquet: row 1: more.x[1]: got b'y' (bytes)" in says(table(prompt=["what"], more=[{"x": [None, b"y"]}]))


def test_files_that_are_not_there_or_cannot_be_written(tmp_path):
    with pytest.raises(Failure, match="none.jsonl: can't be read: No such file"):
        prepare(str(tmp_path / "none.jsonl"), str(tmp_path / "out"), str(WORDS))
    with pytest.raises(Failure, match="is a folder, wanted a JSONL or Parquet file"):
        prepare(str(tmp_path), str(tmp_path / "out"), str(WORDS))
    path = write(tmp_path / "p.jsonl", [{"prompt_ids": [1]}])
    with pytest.raises(Failure, match="none/out: can't be written: No such file") as failure:
        prepare(str(path), str(tmp_path / "none" / "out"))
    assert failure.value.kind == "io"


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path, out = write(tmp_path / "p.jsonl", [{"prompt_ids": [1]}]), tmp_path / "out.jsonl"
    out.write_text("before")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(Failure, match="out.jsonl: can't be written: No space left on device") as failure:
        prepare(str(path), str(out))
    assert failure.value.kind == "io" and out.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "p.jsonl"]
