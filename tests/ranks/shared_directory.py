"""Program for torchrun: two ranks, as if on two nodes, check that their directories are the same one.

Arguments: the directory of each rank. Each rank writes the error, or nothing, to `result_RANK` beside its directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from verl_ext import distributed
from verl_ext.errors import UserError

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, distributed.NODE_CHECK_PAUSES_S = dist.get_rank(), (0.0,)
    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": str(rank)}
    directory, message = Path(sys.argv[1 + rank]), ""
    try:
        distributed.require_shared_directory(directory)
    except UserError as error:
        message = str(error)
    (directory.parent / f"result_{rank}").write_text(message)
    dist.destroy_process_group()
