"""A byte-level GPT, its data and its training loop, for ``examples/train_gpt.py``."""
