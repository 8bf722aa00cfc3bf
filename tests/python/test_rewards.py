import json

import pytest
from conftest import ROOT

import rewards


@pytest.mark.parametrize("completion, answer, wanted", [
    ("Centropolis", "Centropolis", 1 + 0.2 * 31 / 32),
    ("It was CENTROPOLIS.", "Centropolis", 1 + 0.2 * 29 / 32),
    ("the capital of France", "Centropolis", 0.2 * 28 / 32),
    ("1,000 miles", "1000 miles an hour", 0.5 + 0.2 * 30 / 32),
    ("word " * 40 + "Centropolis", "Centropolis", 1.0),
    ("", "Centropolis", 0.0),
    (" ... ", "Centropolis", 0.0),
])
def test_grade_counts_the_answers_words_and_rewards_brevity(completion, answer, wanted):
    assert rewards.grade(completion, answer) == pytest.approx(wanted, abs=1e-15)


def test_a_part_of_a_word_is_not_the_word():
    assert rewards.grade("13000", "300") < 0.2


def test_graded_answer_takes_texts_and_chat_messages_alike():
    chat = [{"role": "assistant", "content": "Earth Chronicle"}]
    answers = {"answer": ["Earth Chronicle"] * 2, "prompt_id": ["a", "b"]}
    values = rewards.graded_answer(["p", "p"], ["Earth Chronicle", chat], [[1], [1]], **answers)
    assert values == [rewards.grade("Earth Chronicle", "Earth Chronicle")] * 2


def test_every_prompt_asks_about_the_same_text_and_the_text_has_the_answer():
    rows = [json.loads(line) for line in (ROOT / "examples/verify/prompts.jsonl").read_text().splitlines()]
    texts = {row["prompt"][0]["content"].split("\n\nQuestion: ")[0] for row in rows}
    assert len(texts) == 1
    assert len({row["prompt_id"] for row in rows}) == len(rows) >= 5
    for row in rows:
        assert rewards.grade(texts.copy().pop(), row["answer"]) >= 1
