"""Command line tools, a package for each: ``nvme`` is ``ds_nvme_bench``."""
