#!/usr/bin/env bash
# Asks PyPI for known vulnerabilities of the pinned packages: bash scripts/audit.sh [cpu|gpu|lmms] [pip-audit options].
# Needs a network and pip-audit (pipx install pip-audit). Exits with 1 if a vulnerability is found or a package cannot
# be looked up; without --strict, the latter would go unnoticed.
set -euo pipefail
CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/.."
flavor=cpu
case "${1:-}" in
  --help | -h) sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
  cpu | gpu | lmms) flavor=$1; shift ;;
esac
command -v pip-audit >/dev/null ||
  { echo "error: pip-audit is not installed; install it outside the environment with: pipx install pip-audit" >&2; exit 2; }
exec pip-audit --strict --no-deps --disable-pip --progress-spinner off -r "requirements/$flavor.txt" "$@"
