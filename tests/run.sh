#!/usr/bin/env bash
# usage: bash tests/run.sh [unit | integration] [pytest arguments ...]
#
# Runs the unit tests, the integration tests, or both. Makes the environment first where it is missing, as run_sft.sh
# does.
#
# examples:
#   bash tests/run.sh
#   bash tests/run.sh unit
#   bash tests/run.sh integration -k resume -x
#
# exit codes:
#   0  every test passed or was skipped
#   1  a test failed; others are pytest's
#   2  bad input; the message says how to mend it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
suites=(tests/unit tests/integration)
case "${1:-}" in
  unit | integration) suites=("tests/$1"); shift ;;
  --help | -h) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
source scripts/environment.sh
source scripts/browser.sh
choose_python
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 WANDB_MODE=offline
code=0 found=5  # pytest's code for a suite of which nothing was chosen
for suite in "${suites[@]}"; do
  if [[ $suite == tests/integration ]]; then ensure_browser; fi
  # unit tests need one processor each; an integration test starts processes of its own
  workers=()
  [[ $suite == tests/unit ]] && workers=(-n 2 --dist loadfile)
  this=0
  "$PYTHON" -m pytest -q --durations=5 "${workers[@]}" "$suite" "$@" || this=$?
  [[ $this == 5 ]] || { found=0; [[ $this == 0 ]] || code=$this; }
done
exit $((code == 0 ? found : code))
