"""DeepSpeed's surface: its ``initialize``, its engine's names, its learning rate schedules."""
