"""Reward of the example: reasoning-gym's own score of the first line."""

import reasoning_gym


def scored(completions, answer, metadata, **columns):
    """What follows the first line would be the next question of the few-shot text, which nobody asked the model to write."""
    rewards = []
    for text, right, data in zip(completions, answer, metadata):
        score_answer = reasoning_gym.get_score_answer_fn(data["source_dataset"])
        rewards.append(float(score_answer(text.partition("\n")[0].strip(), {"answer": right, "metadata": data})))
    return rewards
