#!/usr/bin/env bash
# Group-relative policy optimisation: bash run_grpo.sh NUM_PROCESSES [recipe=NAME] [key=value ...]; --help says more.
set -euo pipefail
export VERL_EXT_CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
case " $* " in
  *" --help "* | *" -h "*) PYTHON=$(find_base_python) ;;  # help needs no packages, so it makes no .venv
  *) choose_python ;;
esac
exec "$PYTHON" -m verl_ext.launch grpo "$@"
