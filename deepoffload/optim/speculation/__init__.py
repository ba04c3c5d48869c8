"""Updates that are made inside backward on a guess, and confirmed or undone by ``step()``."""
