"""Which settings are fastest: candidates, what the cost model says of each, and the best ones run for some steps."""
