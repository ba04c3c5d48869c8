"""Gradients on the host and the optimizers that consume them."""
