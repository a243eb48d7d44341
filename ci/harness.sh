#!/usr/bin/env bash
# Runs harness from the root of the checkout: in the image HARNESS_IMAGE, or in .venv, which is set up when needed.
# HARNESS_GPUS are the image's GPUs ('all' or a number); HARNESS_MODELS is a folder of models that it may read.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${HARNESS_IMAGE:-}" ]; then
  source scripts/environment.sh
  ensure_environment
  exec "$VENV/bin/python" -m harness "$@"
fi
options=(--rm --init --shm-size 8g --user "$(id -u):$(id -g)" --volume "$PWD:$PWD" --workdir "$PWD" --env HOME=/tmp)
# Only the name: the value must not stand on a command line.
options+=(--env HF_TOKEN)
[ -z "${HARNESS_GPUS:-}" ] || options+=(--gpus "$HARNESS_GPUS")
[ -z "${HARNESS_MODELS:-}" ] || options+=(--volume "$HARNESS_MODELS:$HARNESS_MODELS:ro")
exec docker run "${options[@]}" "$HARNESS_IMAGE" "$@"
