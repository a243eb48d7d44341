# Sourced: small_environment DIR ARGS makes the virtual environment DIR with what `pip install ARGS` installs, in the
# locked versions and without torch and vLLM. Exits with code 2 where that cannot be had.
source scripts/environment.sh

small_environment() {
  local folder="$1"
  shift
  "$(find_python)" -m venv --clear "$folder" || exit 2
  # As locked: a constraint installs nothing by itself. Without the hashes, which pip wants for everything or nothing.
  grep -v -e '^torch' -e '^vllm' -e '^ ' requirements/cpu.txt | sed 's/ \\$//' >"$folder/constraints.txt"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$folder/constraints.txt" "$@" ||
    exit 2
}
