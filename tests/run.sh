#!/usr/bin/env bash
# usage: bash tests/run.sh [lint | unit | integration | coverage] [pytest arguments ...]
#
# Runs the checks and tests. Without the first word: lint (ruff and the type checker), then both suites. coverage runs
# both suites, counts which statements they run, in the processes that they start too, and writes docs/coverage.md; of
# chosen tests it only tells.
# Makes the environment first where it is missing, as run_sft.sh does.
#
# examples:
#   bash tests/run.sh
#   bash tests/run.sh unit
#   bash tests/run.sh integration -k resume -x
#
# exit codes:
#   0  every test passed or was skipped
#   1  a test or a check failed; others are pytest's
#   2  bad input; the message says how to mend it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for word in "$@"; do
  if [[ $word == --help || $word == -h ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; fi
done
source scripts/environment.sh
source scripts/browser.sh
source scripts/lint.sh
choose_python
suites=(tests/unit tests/integration) pytest=(-m pytest) measures=""
case "${1:-}" in
  lint) lint; exit ;;
  unit | integration) suites=("tests/$1"); shift ;;
  coverage)
    shift
    pytest=(-m coverage run -m pytest) measures=yes
    export COVERAGE_FILE="$PWD/.coverage/data"
    rm -rf .coverage && mkdir .coverage
    ;;
  *) lint || exit ;;
esac
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 WANDB_MODE=offline
code=0 found=5  # pytest's code for a suite of which nothing was chosen
for suite in "${suites[@]}"; do
  if [[ $suite == tests/integration ]]; then ensure_browser; fi
  # unit tests need one processor each; an integration test starts processes of its own
  workers=()
  [[ $suite == tests/unit ]] && workers=(-n 2 --dist loadfile)
  this=0
  "$PYTHON" "${pytest[@]}" -q --durations=5 "${workers[@]}" "$suite" "$@" || this=$?
  [[ $this == 5 ]] || { found=0; [[ $this == 0 ]] || code=$this; }
done
if [[ -n $measures ]]; then
  "$PYTHON" -m coverage combine -q || code=1
  if (($#)); then  # of chosen tests there is no page
    "$PYTHON" -m coverage report --skip-covered || code=1
  else
    "$PYTHON" -m tests.coverage_page || code=1
  fi
fi
exit $((code == 0 ? found : code))
