"""The Python side of LongStraw: tokenizing and rewards, in a process of its own."""
