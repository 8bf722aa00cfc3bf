"""The reward of examples/verify: is the answer there, and how briefly is it given?

A reward function gets the batch as lists of equal length and gives one number a completion, or None for "no opinion".
"""
import re

ANSWER_WEIGHT, BREVITY_WEIGHT = 1.0, 0.2
LONGEST = 32   # words; from here on nothing is given for brevity


def words(text):
    """Lower-case words and numbers; 1,000 and 1000 are the same."""
    return re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d)", "", text.lower()))


def text_of(completion):
    """A completion is a text, or a list of chat messages."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


def grade(completion, answer):
    """Share of the answer's words that are there, and a bonus for few words: 0 to 1.2."""
    given, wanted = words(completion), words(answer)
    if not given:
        return 0.0
    found = sum(word in given for word in wanted) / len(wanted)
    brevity = max(0.0, 1.0 - len(given) / LONGEST)
    return ANSWER_WEIGHT * found + BREVITY_WEIGHT * brevity


def graded_answer(prompts, completions, completion_ids, answer, **columns):
    return [grade(text_of(completion), wanted) for completion, wanted in zip(completions, answer)]
