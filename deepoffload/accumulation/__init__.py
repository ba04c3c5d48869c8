"""Gradient accumulation in which all micro-batches of a step go through one unit before any goes on to the next."""
