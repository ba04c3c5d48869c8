"""The engine around a model: construction under a budget, units, hooks, training step."""
