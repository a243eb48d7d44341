# Sourced. Environments are below HARNESS_CACHE (a folder of the user's cache), by the path of the checkout: no checkout
# removes them there. small_environment DIR ARGS makes one with what `pip install ARGS` installs, in the locked versions
# and without torch and vLLM, and leaves its path in VENV. locked_environment DIR LOCK does so with all that a lock names,
# and its hashes. Both exit with code 2 where that cannot be had.
source scripts/environment.sh

CACHE="${HARNESS_CACHE:-${XDG_CACHE_HOME:-${HOME:-$ROOT}/.cache}/kv-acceptance-harness}"
VENVS="$CACHE/checkouts/$(printf '%s' "$ROOT" | sha256sum | cut -c1-16)"
VENV="$VENVS/engines"
mkdir -p "$VENVS"

small_environment() {
  local wanted
  VENV="$VENVS/$1"
  shift
  wanted="$* $(cat requirements/cpu.txt pyproject.toml | sha256sum)"
  if [ "$(cat "$VENV/.stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  "$(find_python)" -m venv --clear "$VENV" || exit 2
  # As locked: a constraint installs nothing by itself. Without the hashes, which pip wants for everything or nothing.
  grep -v -e '^torch' -e '^vllm' -e '^ ' requirements/cpu.txt | sed 's/ \\$//' >"$VENV/constraints.txt"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$VENV/constraints.txt" "$@" >&2 ||
    exit 2
  printf '%s' "$wanted" >"$VENV/.stamp"
}

locked_environment() {
  local wanted
  VENV="$VENVS/$1"
  wanted="$(sha256sum <"$2")"
  if [ "$(cat "$VENV/.stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  "$(find_python)" -m venv --clear "$VENV" || exit 2
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$2" >&2 || exit 2
  printf '%s' "$wanted" >"$VENV/.stamp"
}
