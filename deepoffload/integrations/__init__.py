"""Doors for other people's trainers, one file each. Each needs the package it is named after, and none is imported by
``import deepoffload``."""

from __future__ import annotations
