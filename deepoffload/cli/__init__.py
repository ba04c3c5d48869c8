"""Command line tools. Import the module you need; ``ds_nvme_bench`` is :func:`deepoffload.cli.nvme_bench.main`."""
