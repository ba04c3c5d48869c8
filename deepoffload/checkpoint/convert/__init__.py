"""Checkpoints of other libraries, read and written tensor by tensor."""
