# Sourced by tests/run.sh: lint runs ruff and mypy with the interpreter $PYTHON. pyproject.toml configures them.

has_lint_tools() {
  local tool
  for tool in ruff mypy; do
    "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$tool') is None)" || {
      echo "error: $PYTHON has no $tool; install the packages of requirements/cpu.txt there, or unset VERL_EXT_PYTHON" >&2
      return 2
    }
  done
}

lint() {
  has_lint_tools || return
  found "ruff check" -m ruff check --quiet . &&
    found "ruff format" -m ruff format --quiet --diff . &&
    found "mypy" -m mypy --no-error-summary &&
    # a folder of scripts that import each other by plain names, as in a sandbox
    MYPYPATH=eval_pipeline/judge/inside found "mypy" -m mypy --no-error-summary --explicit-package-bases \
      eval_pipeline/judge/inside/*.py
}

found() {  # $1: name of a check, then its command
  "$PYTHON" "${@:2}" || {
    echo "error: $1 failed; fix the problems above, and check again with 'bash tests/run.sh lint'" >&2
    return 1
  }
}
