"""Bytes to disk and back: the engine and its tickets, swap files and their extents, and what a path can do.

Import the module you need (``deepoffload.io.engine``, ``deepoffload.io.swap_space``, ``deepoffload.io.probe``).
"""
