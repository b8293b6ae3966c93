# Sourced by tests/run.sh: ensure_browser sees to a Chromium for the tests of the monitor's page.
#
# Debian's package is installed where that needs no question: by root, with apt-get. Elsewhere those tests are skipped,
# and say so.

ensure_browser() {
  local name
  for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then return; fi
  done
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "Installing chromium for the tests of the monitor's page ..." >&2
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 && return
  fi
  echo "warning: there is no Chromium, so the tests of the monitor's page are skipped; install your system's chromium package" >&2
}
