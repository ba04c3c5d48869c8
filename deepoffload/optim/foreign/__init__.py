"""Optimizers of other packages, stepped unit by unit with their state in the pieces of units."""
