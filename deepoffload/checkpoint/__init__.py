"""Models to and from files, inside the budget."""
