#!/usr/bin/env bash
# Makes requirements/*.txt anew: ./scripts/lock.sh [UV OPTION …], after a change in pyproject.toml. Versions stay as they
# are unless an option asks for others, as --upgrade-package NAME does.
set -euo pipefail
source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/environment.sh"
cd "$ROOT"

compile() {
  local out="$1"
  shift
  "$UV" pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header -o "$out" "$@"
}

UV="$(find_uv)"
links="$(find_links)"
[ -z "$links" ] || export UV_FIND_LINKS="$links"
for extra in cpu gpu; do
  compile "requirements/$extra.txt" pyproject.toml --override "requirements/$extra.overrides.txt" \
    --extra "$extra" --extra dev --extra natural --extra ray --extra router "$@"
done
# PyTorch's CPU builds come from an index or a folder that has other files for each Python than the one that this reads.
sed -i -z -E 's/\n(torch==[^ ]+\+cpu) \\(\n    --hash=[^\n]*)+/\n\1/' requirements/cpu.txt
printf 'mkdocs-material>=9.7\n' | compile requirements/docs.txt -
# A version by itself, so that an installation of uv is checked, too.
printf 'uv==%s\n' "$("$UV" --version | cut -d' ' -f2)" | compile requirements/uv.txt -
