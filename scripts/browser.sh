# Sourced by tests/run.sh: the monitor's tests need the system's Chromium.

has_browser() {
  local name
  for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then return; fi
  done
  return 1
}

install_browser() {  # Debian's package; only on request
  has_browser && return
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: --install needs root and apt-get; install your system's chromium package by hand" >&2
    return 2
  fi
  echo "Installing Chromium ..." >&2
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } >/dev/null || {
    echo "error: apt-get could not install chromium (see above)" >&2
    return 2
  }
}

warn_without_browser() {
  has_browser && return
  echo "warning: Chromium was not found, so the monitor's browser tests are skipped. Install your system's chromium package, or run bash tests/run.sh --install as root" >&2
}
