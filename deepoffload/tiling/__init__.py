"""Long sequences and large layers: logits, linear layers and MLPs that are computed in tiles."""
