"""Reward of the recall task: 1 for the one right token, else 0."""


def recalled(completion_ids, answer, **columns):
    return [float(ids == [right]) for ids, right in zip(completion_ids, answer)]
