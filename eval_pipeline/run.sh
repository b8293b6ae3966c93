#!/usr/bin/env bash
# Evaluation: bash eval_pipeline/run.sh COMMAND ...; see --help. Creates the Python environment if it is missing.
set -euo pipefail
export VERL_EXT_CALLED_FROM=$PWD
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
choose_python_for "$@"
exec "$PYTHON" -m eval_pipeline "$@"
