"""What tensors show where that is not the stored bytes themselves: copies of blocks, and how they come and go."""
