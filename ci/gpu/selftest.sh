#!/usr/bin/env bash
# The self-test on a GPU, to its end: each fault that the profile `gpu` can show is put into its engines. It needs that
# profile's baselines of this kind of GPU, which are recorded where baselines/gpu is empty. The faults of --all that need
# engines of another layout are left out: their profiles are of CPU engines.
# Minutes by plan on one GPU: record 2, selftest 5.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
profile=gpu faults=() alone=(--cell 'single-*') limits=(300 900)
if [ "$device" = cpu ]; then
  # Of the few prompts of a dry run no law of lengths can be told, which other faults are to be killed by.
  profile=cpu faults=(N2 M4) alone=(--cell single-none) limits=(90 90)
fi
mapfile -t into < <(into)
if [ "$device" = cpu ] || ! compgen -G 'baselines/gpu/*.json' >/dev/null; then
  step record "${limits[0]}" baseline record --profile "$profile" "${alone[@]}" "${into[@]}"
else
  steps+=(record)
fi
step selftest "${limits[1]}" selftest --profile "$profile" "${faults[@]}"
finish "$profile"
