"""Watching a run: monitors, and the profile of one step."""
