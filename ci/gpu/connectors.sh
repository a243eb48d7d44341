#!/usr/bin/env bash
# NIXL beside the connectors that keep blocks in the host's memory, one after the other, judged by the baselines of the
# profile `gpu` of this kind of GPU, which are recorded where baselines/gpu is empty.
# Minutes by plan on one GPU: record 2, each way 3.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ways=(multi offloading simple) usual=gpu profile=gpu-connectors few=() alone=(--cell 'single-*') limits=(300 480)
if [ "$device" = cpu ]; then
  # NIXL alone in a MultiConnector.
  ways=(multi) usual=cpu profile=cpu-multi few=(--scenario prefix-hit) alone=(--cell single-none) limits=(90 90)
  cells=(--cell pd-none --cell single-none)
fi
each_way
finish "$usual"
