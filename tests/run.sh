#!/usr/bin/env bash
# Runs the tests: bash tests/run.sh [unit|integration] [pytest arguments ...]; without the first, both.
# Makes the environment first where it is missing, as run_sft.sh does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
source scripts/browser.sh
choose_python
suites=(tests/unit tests/integration)
case "${1:-}" in
  unit | integration) suites=("tests/$1"); shift ;;
  --help | -h) sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
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
