"""What model states take, in DeepSpeed's formulas and in ours, from numbers alone.

python tools/estimate_model_states.py --total-params 2.85e9 --largest-layer-params 32.9e6 --gpus-per-node 8
"""

from __future__ import annotations

import sys

from deepoffload.errors import DeepOffloadError
from deepoffload.estimate import estimate_model_states_mem_needs_all_cold
from deepoffload.estimate.arguments import Parser


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--total-params", type=float, required=True)
    parser.add_argument("--largest-layer-params", type=float, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--buffer-factor", type=float, default=1.5, help="DeepSpeed's additional_buffer_factor")
    try:
        options = parser.parse_args()
        estimate_model_states_mem_needs_all_cold(
            options.total_params,
            options.largest_layer_params,
            options.gpus_per_node,
            options.nodes,
            options.buffer_factor,
        )
    except DeepOffloadError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
