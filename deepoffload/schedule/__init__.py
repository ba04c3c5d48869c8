"""What to keep near, what to move, and when: pure functions and plain data, without torch, I/O, threads or clocks."""
