"""Thin wrappers of the two compiled modules; nothing is imported here, so that neither is loaded before it is used."""
