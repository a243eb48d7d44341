# Sourced by the run scripts: makes or updates .venv from the committed lock and leaves its path in VENV.
# HARNESS_EXTRA=cpu|gpu chooses the lock (default cpu); PYTHON names the interpreter to build .venv with;
# CHROMIUM names the browser that the tests of the report pages drive.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

fail() { printf 'setup: %s\n' "$*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
       "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      printf '%s' "$candidate"; return
    fi
  done
  fail "expected Python 3.11 or 3.12 on the PATH, found none; install one, or name it: PYTHON=/path/to/python3.11 $0"
}

# uv does not read pip's find-links, which is where a local CPU build of torch may be.
find_links() {
  local links="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
  [ -n "$links" ] || links="$("$VENV/bin/python" -m pip config get global.find-links 2>/dev/null || true)"
  printf '%s' "$links"
}

# Prints the path of uv, which is installed into .venv where there is none on the PATH.
find_uv() {
  if command -v uv; then return; fi
  "$VENV/bin/uv" --version >/dev/null 2>&1 ||
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$ROOT/requirements/uv.txt" >&2 ||
    fail "uv could not be installed with pip; check the package index that pip uses, or install uv yourself"
  printf '%s' "$VENV/bin/uv"
}

# Otherwise the first engines compile the packages, all at the same time. A quarter is left out, which nothing imports
# here: tests, and the code of other models and other uses.
compile_packages() {
  local unused='tests?|testing|transformers/models/(?!auto|llama)\w+|ray/(rllib|data|serve|tune|train|dashboard|llm)'
  unused+='|numba|anthropic|mypyc?|pip|lexers|openai/resources|sympy/physics'
  "$VENV/bin/python" -m compileall -q -j 0 -x "/($unused)/" \
    "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
}

ensure_environment() {
  local extra="${HARNESS_EXTRA:-cpu}" lock stamp wanted uv log links
  case "$extra" in cpu|gpu) ;; *) fail "expected HARNESS_EXTRA=cpu or gpu, found '$extra'" ;; esac
  lock="$ROOT/requirements/$extra.txt"
  [ -f "$lock" ] || fail "expected the lock $lock, found none; restore it from version control"
  stamp="$VENV/.lock-stamp"
  wanted="$extra $(cat "$lock" "$ROOT/pyproject.toml" | sha256sum | cut -d' ' -f1) $ROOT"
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi

  printf 'setup: making %s from requirements/%s.txt\n' "$VENV" "$extra" >&2
  rm -f "$stamp"
  # A venv without pip (made by other tools) cannot be given uv; make it anew.
  if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
    rm -rf "$VENV"
    "$(find_python)" -m venv "$VENV" || fail "python -m venv failed; install the venv module of your Python (Debian: python3-venv)"
  fi
  uv="$(find_uv)"
  log="$VENV/install.log"
  links="$(find_links)"
  export VIRTUAL_ENV="$VENV"
  [ -z "$links" ] || export UV_FIND_LINKS="$links"
  if ! "$uv" pip install --no-deps -r "$lock" >"$log" 2>&1; then
    # Without a local build, uv knows where PyTorch keeps its CPU builds.
    if [ "$extra" != cpu ] || ! "$uv" pip install --no-deps --torch-backend cpu -r "$lock" >>"$log" 2>&1; then
      tail -n 5 "$log" >&2
      fail "the packages of requirements/$extra.txt could not be installed (lines above; all of it in $log). If torch \
is what is missing, put its CPU wheel into a folder and run again with UV_FIND_LINKS=/that/folder"
    fi
  fi
  compile_packages >>"$log" 2>&1 || true
  # With the locked setuptools.
  "$uv" pip install --no-deps --no-build-isolation -e "$ROOT" >>"$log" 2>&1 ||
    fail "the project itself could not be installed; see $log"
  printf '%s' "$wanted" >"$stamp"
}

# The same places in the same order as tests/browser/chromium.py.
find_chromium() {
  local candidate
  for candidate in ${CHROMIUM:+"$CHROMIUM"} chromium chromium-browser google-chrome; do
    if command -v "$candidate" >/dev/null 2>&1; then command -v "$candidate"; return; fi
    # A browser that was named and is not there is a mistake, not a wish for another one.
    [ "$candidate" != "${CHROMIUM:-}" ] || return 1
  done
  return 1
}

# Leaves the browser's path in CHROMIUM; installs Debian's package where that is possible.
ensure_chromium() {
  local found log="$VENV/chromium.log"
  if found="$(find_chromium)"; then export CHROMIUM="$found"; return; fi
  [ -z "${CHROMIUM:-}" ] ||
    fail "expected CHROMIUM to name a Chromium, found no program '$CHROMIUM'; correct it, or unset it to have one found"
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    fail "expected chromium, chromium-browser or google-chrome on the PATH for the tests of the report pages, found none; \
install one (Debian: apt-get install chromium), or name it: CHROMIUM=/path/to/chromium $0"
  fi
  printf 'setup: installing chromium with apt-get\n' >&2
  if ! { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends chromium; } \
    >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    fail "apt-get could not install chromium (lines above; all of it in $log); install one yourself, or name it: \
CHROMIUM=/path/to/chromium $0"
  fi
  found="$(find_chromium)" || fail "expected chromium on the PATH after its installation, found none; see $log"
  export CHROMIUM="$found"
}
