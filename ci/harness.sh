#!/usr/bin/env bash
# Runs harness from the root of the checkout, in an environment that is made when needed (ci/environment.sh). HARNESS_VLLM
# says which vLLM the engines have: a version, a wheel (path or address), a commit of its main branch, an interpreter, or
# an image that has one (NAME@sha256:DIGEST); empty for the locked one. HARNESS_IMAGE is an image of this project instead
# (docs/ci.md). Images get the GPUs of CUDA_VISIBLE_DEVICES, and the folder of models (HF_HOME).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh
image="${HARNESS_IMAGE:-}" vllm="${HARNESS_VLLM:-}" extra="${HARNESS_EXTRA:-cpu}"
judges=false
case "${1-}" in check | ci | clean | merge | report | trend) judges=true ;; esac
if [[ "$vllm" == *@sha256:* ]] && [ "$judges" = false ]; then image="${image:-$vllm}"; fi

if [ -n "${HARNESS_IMAGE:-}" ] && [ -n "$vllm" ]; then
  printf "ci: expected HARNESS_IMAGE or HARNESS_VLLM, found both; the image has a vLLM of its own, so leave one out\n" >&2
  exit 64
fi
if [ -z "$image" ]; then
  engines=()
  if [ "$judges" = true ]; then
    small_environment judging --editable .
  elif [ -z "$vllm" ]; then
    ensure_environment
  else
    small_environment recording --editable '.[run,natural,router]'
    case "${1-} ${2-}" in
      "run "* | "baseline record" | "doctor "*)
        python="$("$VENV/bin/python" -m harness ci engines "$vllm" --device "$extra")"
        engines=(--engine-python "$python")
        PATH="$(dirname "$python"):$PATH"
        ;;
    esac
  fi
  # vLLM looks for programs of its environment, such as ninja, on the PATH.
  export PATH="$VENV/bin:$PATH"
  exec "$VENV/bin/python" -m harness "$@" "${engines[@]}"
fi

# A tag can be moved, and what is no name could be an option of docker's.
if [[ ! "$image" =~ ^[a-z0-9][A-Za-z0-9._/:-]*@sha256:[0-9a-f]{64}$ ]]; then
  printf "ci: expected an image pinned by digest (NAME@sha256: and 64 hexadecimal digits), found '%s'\n" "$image" >&2
  exit 64
fi
for path in "$PWD" "$CACHE" "${HF_HOME:-}"; do
  if [[ "$path" == *:* ]]; then
    printf "ci: expected a path without ':', which docker takes for the end of a volume's name, found '%s'; move it\n" \
      "$path" >&2
    exit 64
  fi
done
# Kernels that engines compile are kept in the home folder.
home="$CACHE/images/${image##*:}"
models="${HF_HOME:-$home/.cache/huggingface}"
mkdir -p "$home" "$models"
options=(--rm --init --shm-size 8g --user "$(id -u):$(id -g)" --workdir "$PWD" --env "HOME=$home" --env "HF_HOME=$models")
for path in "$PWD" "$home" "$models"; do options+=(--volume "$path:$path"); done
options+=(--cap-drop ALL --security-opt no-new-privileges)
# Judging needs no network.
case "${1-}" in check | report | merge | trend) options+=(--network none) ;; esac
# Only the name: the value must not stand on a command line.
options+=(--env HF_TOKEN)
if [ "$extra" = gpu ]; then
  devices=all
  [ -z "${CUDA_VISIBLE_DEVICES:-}" ] || devices="\"device=$CUDA_VISIBLE_DEVICES\""
  options+=(--gpus "$devices")
  # RDMA registers memory, of which a container may lock little by default.
  options+=(--ulimit memlock=-1:-1)
  [ ! -e /dev/infiniband ] || options+=(--device /dev/infiniband)
fi
if [ -n "${HARNESS_IMAGE:-}" ]; then
  # Prompts and baselines are the checkout's, code is the image's.
  for data in prompts baselines; do options+=(--volume "$PWD/$data:/opt/harness/$data"); done
  exec docker run "${options[@]}" "$image" "$@"
fi
# The checkout's harness, with the vLLM of the image's Python.
options+=(--entrypoint "$PWD/ci/harness.sh" --env HARNESS_VLLM=python3 --env "HARNESS_EXTRA=$extra" --env HARNESS_IMAGE=)
exec docker run "${options[@]}" "$image" "$@"
