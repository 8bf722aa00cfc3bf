"""A reward file that can't be imported."""

import no_such_module_anywhere  # noqa: F401


def reward(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completions)
