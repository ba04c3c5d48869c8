"""Who holds which bytes: the arena, the blocks in it, and the manager that moves them between host memory and NVMe."""
