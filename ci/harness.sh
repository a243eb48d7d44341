#!/usr/bin/env bash
# Runs harness from the root of the checkout: in the image HARNESS_IMAGE, or in .venv, which is set up when needed.
# HARNESS_GPUS are the image's GPUs ('all' or a number); HARNESS_MODELS is the folder of the hub's cache (HF_HOME), by
# default one in the checkout. Prompts and baselines are the checkout's, code is the image's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${HARNESS_IMAGE:-}" ]; then
  source scripts/environment.sh
  ensure_environment
  exec "$VENV/bin/python" -m harness "$@"
fi
# A tag can be moved, and what is no name could be an option of docker's.
if [[ ! "$HARNESS_IMAGE" =~ ^[a-z0-9][A-Za-z0-9._/:-]*@sha256:[0-9a-f]{64}$ ]]; then
  printf "ci: expected HARNESS_IMAGE pinned by digest (NAME@sha256: and 64 hexadecimal digits), found '%s'\n" \
    "$HARNESS_IMAGE" >&2
  exit 64
fi
if [[ "$PWD" == *:* ]]; then
  printf "ci: expected a path without ':', which docker takes for the end of a volume's name, found '%s'; move the checkout\n" \
    "$PWD" >&2
  exit 64
fi
options=(--rm --init --shm-size 8g --user "$(id -u):$(id -g)" --volume "$PWD:$PWD" --workdir "$PWD" --env HOME=/tmp)
options+=(--cap-drop ALL --security-opt no-new-privileges)
# Judging needs no network.
case "${1-}" in check | report | merge | trend) options+=(--network none) ;; esac
# Only the name: the value must not stand on a command line.
options+=(--env HF_TOKEN)
[ -z "${HARNESS_GPUS:-}" ] || options+=(--gpus "$HARNESS_GPUS")
models="${HARNESS_MODELS:-$PWD/.hub}"
mkdir -p "$models"
options+=(--volume "$models:$models" --env "HF_HOME=$models")
for data in prompts baselines; do options+=(--volume "$PWD/$data:/opt/harness/$data"); done
exec docker run "${options[@]}" "$HARNESS_IMAGE" "$@"
