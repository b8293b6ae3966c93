"""Program for torchrun: ranks, as if each on a node of its own, compare their settings.

Arguments: the settings of each rank, as JSON, then the directory of the results. Each rank writes the error, or
nothing, to `result_RANK`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from verl_ext.distributed import require_same_settings
from verl_ext.errors import UserError

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, message = dist.get_rank(), ""
    os.environ["GROUP_RANK"] = str(rank)
    try:
        require_same_settings(json.loads(sys.argv[1 + rank]))
    except UserError as error:
        message = str(error)
    (Path(sys.argv[-1]) / f"result_{rank}").write_text(message)
    dist.destroy_process_group()
