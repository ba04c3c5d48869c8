"""Several processes that train one model: who they are, and how their bytes get from one to the other."""
