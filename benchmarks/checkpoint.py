"""How long training waits for a checkpoint: verl's manager, ours, and ours in the background, in one run.

A random Qwen2 model of more than 100M parameters with AdamW state is sharded with FSDP2, and the managers take turns
saving it. Between two saves, the disk cache is flushed, so that no save pays for another. `stall` is the time until all
ranks have returned from the call. `flush` is the time to write the rest to the disk afterwards: verl's manager leaves
that to the kernel, ours does it before the commit. `plain` is the time of the disk alone: the same number of processes
write the same number of bytes to plain files, and flush them. Results are medians, with their `ranges`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from benchmarks.harness import bench_parser, write_results
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.errors import UserError


@clean_exit()
def main() -> None:
    """Measure on every rank; rank 0 prints and writes the results."""
    launcher = "torchrun --nproc-per-node=2"
    parser = bench_parser("checkpoint", __doc__, "", "--repeats 3 --output FILE.json", launcher=launcher)
    directory = Path("checkpoints/benchmark")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", default=directory, help="new directory; removed at the end"
    )
    parser.add_argument("--tokenizer", metavar="DIR", default="data/quickstart/model", help="saved with each export")
    parser.add_argument("--repeats", type=IntArg(), default=6, help="saves of each kind, ideally an even number")
    parser.add_argument(
        "--quick", action="store_true", help="only verl's saves and our synchronous ones, without resuming"
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        raise UserError(f"this process is not a rank; start it as `{launcher} -m benchmarks.checkpoint`")
    if arguments.directory.exists():
        raise UserError(f"{arguments.directory} already exists; remove it, or specify another --directory")
    if not Path(arguments.tokenizer).is_dir():
        raise UserError(
            f"--tokenizer {arguments.tokenizer} does not exist; create the default with "
            "`python -m verl_ext.data.prepare quickstart --output data/quickstart`"
        )
    import torch  # here, because it takes seconds to import
    import torch.distributed as dist

    from benchmarks.checkpoint_ranks import measure
    from verl_ext.distributed import init_process_group

    init_process_group("cuda" if torch.cuda.is_available() else "cpu")
    results = measure(arguments.directory, arguments.tokenizer, arguments.repeats, arguments.quick)
    if dist.get_rank() == 0:
        print_line(json.dumps(results, indent=1))
        write_results(results, arguments.output)
        shutil.rmtree(arguments.directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
