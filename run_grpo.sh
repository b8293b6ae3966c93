#!/usr/bin/env bash
# Group relative policy optimization: bash run_grpo.sh NUM_RANKS [recipe=NAME] [key=value ...]; see --help.
set -euo pipefail
export VERL_EXT_CALLED_FROM=$PWD
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
choose_python_for "$@"
exec "$PYTHON" -m verl_ext.launch grpo "$@"
