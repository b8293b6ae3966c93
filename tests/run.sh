#!/usr/bin/env bash
# usage: bash tests/run.sh [--install] [lint | unit | integration | campaigns | all | coverage [SUITE]] [pytest arguments ...]
#
# Runs checks and tests. The default is lint (ruff and mypy), the unit tests and the integration tests: about 17
# minutes on two cores. Like run_sft.sh, creates .venv first if it is missing.
#
#   unit         tests of single parts, in one process
#   integration  tests of the commands that users run: real ranks, vLLM, sandbox and browser
#   campaigns    slow tests: random kills, hundreds of hostile answers, model matrices; one file at a time
#   all          lint, unit, integration, campaigns
#   coverage     unit, integration and campaigns, or only SUITE, with coverage of every process, started from scratch;
#                adds to .coverage/ and prints the total
#   --install    install Chromium with apt-get if it is missing (as root); without it the browser tests are skipped
#
# TESTS_COLD=1 starts every command from scratch; otherwise commands are forked from a process that has imported torch.
#
# examples:
#   bash tests/run.sh
#   bash tests/run.sh unit -k packing
#   bash tests/run.sh integration -x tests/integration/test_preemption.py
#   bash tests/run.sh campaigns tests/campaigns/test_faults.py
#
# exit codes:
#   0  every test passed or was skipped
#   1  a test or a check failed, or a test left a process behind; other codes are pytest's
#   2  bad input; the message says how to fix it
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
for word in "$@"; do
  if [[ $word == --help || $word == -h ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0; fi
done
source scripts/environment.sh
source scripts/browser.sh
source scripts/lint.sh
if [[ ${1:-} == --install ]]; then shift; install_browser || exit; fi
choose_python
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 WANDB_MODE=offline
pytest=(-m tests.helpers.subreaper "$PYTHON" -m pytest) lints="" measures=""
case "${1:-}" in
  lint) lint; exit ;;
  unit | integration | campaigns) suites=("$1"); shift ;;
  all) suites=(unit integration campaigns) lints=yes; shift ;;
  coverage)
    shift
    suites=(unit integration campaigns) measures=yes
    case "${1:-}" in unit | integration | campaigns) suites=("$1"); shift ;; esac
    export TESTS_COLD=1 COVERAGE_FILE="$PWD/.coverage/data"
    mkdir -p .coverage
    pytest=(-m tests.helpers.subreaper "$PYTHON" -m coverage run -m pytest)
    ;;
  *) suites=(unit integration) lints=yes ;;
esac

workers_of() {  # $1: suite. Campaigns run alone on the machine; single unit tests start faster without workers.
  local word
  for word in "${arguments[@]}"; do
    if [[ $1 == unit && ($word == -k || $word == *::*) ]]; then echo "-n 0"; return; fi
  done
  if [[ $1 == campaigns ]]; then echo "-n 0"; else echo "-n 2 --dist loadfile --no-loadscope-reorder"; fi
}

paths_of() {  # $1: suite. Prints nothing if the arguments name a path.
  local word
  for word in "${arguments[@]}"; do [[ $word == tests/* ]] && return; done
  echo "tests/$1"
}

code=0 found=5  # pytest's code for "no tests were collected"
arguments=("$@")
if [[ -n $lints ]]; then  # mypy needs one core; the unit tests wait for processes much of the time
  has_lint_tools || exit
  lint_log=$(mktemp)
  lint >"$lint_log" 2>&1 &
  lint_process=$!
fi
for suite in "${suites[@]}"; do
  if [[ $suite != unit ]]; then warn_without_browser; fi
  this=0
  # shellcheck disable=SC2046
  "$PYTHON" "${pytest[@]}" -q --durations=5 $(workers_of "$suite") $(paths_of "$suite") "$@" || this=$?
  [[ $this == 5 ]] || { found=0; [[ $this == 0 ]] || code=$this; }
  if [[ -n $lints && $suite == unit ]]; then
    wait "$lint_process" || code=1
    cat "$lint_log" >&2
    rm "$lint_log"
  fi
done
if [[ -n $measures ]]; then
  "$PYTHON" -m coverage combine -q --append || code=1
  "$PYTHON" -m coverage report --skip-covered || code=1
fi
exit $((code == 0 ? found : code))
