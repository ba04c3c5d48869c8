"""``ds_nvme_bench``: what a disk gives, and which settings reach it. ``main`` is the command."""
