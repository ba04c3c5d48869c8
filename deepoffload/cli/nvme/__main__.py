"""``python -m deepoffload.cli.nvme`` is ``ds_nvme_bench``."""

from __future__ import annotations

import sys

from deepoffload.cli.nvme.main import main

sys.exit(main())
