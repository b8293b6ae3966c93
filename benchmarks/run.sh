#!/usr/bin/env bash
# usage: bash benchmarks/run.sh [--quick]
#
# Repeats the benchmarks of SFT, GRPO, checkpoints, starts, the plan, a controller's knobs and the evaluation of an
# untrained model, which takes hours, and replaces the committed results. --quick compares some ratios with the
# committed ones in less than 5 minutes. To run a single benchmark, see `python -m benchmarks.NAME --help`.
#
# examples:
#   bash benchmarks/run.sh --quick
#   bash benchmarks/run.sh
#
# exit codes:
#   0  done
#   2  bad input; the message says how to fix it
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
  --help | -h) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  --quick) [[ $# == 1 ]] || wrong="--quick takes no further arguments" ;;
  "") ;;
  *) wrong="there is no '$1'; the only option is --quick" ;;
esac
if [[ -n ${wrong:-} ]]; then
  echo "error: $wrong; see \`bash benchmarks/run.sh --help\`" >&2
  exit 2
fi
source scripts/environment.sh
choose_python
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline
if [[ ${1:-} == --quick ]]; then exec "$PYTHON" -m benchmarks.quick; fi
results=benchmarks/results
"$PYTHON" -m verl_ext.data.prepare quickstart --output data/quickstart
"$PYTHON" -m verl_ext.data.prepare smollm2 --output data/smollm2_135m
"$PYTHON" -m benchmarks.sft --rounds 3 --output $results/sft_2cpu.json
"$PYTHON" -m benchmarks.start --output $results/start_2cpu.json
"$PYTHON" -m benchmarks.plan --output $results/plan_2cpu.json
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node=2 -m benchmarks.checkpoint \
  --output $results/checkpoint_2cpu_disk.json
"$PYTHON" -m benchmarks.grpo --ranks 2 --output $results/grpo_2ranks_2cpu.json
"$PYTHON" -m benchmarks.adaptive --output $results/adaptive_1thread_cpu.json
"$PYTHON" -m benchmarks.evaluation --model data/quickstart/model \
  --output $results/evaluation_2cpu_random_model.json sampling.max_tokens=64
