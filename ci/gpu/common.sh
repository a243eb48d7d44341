# Sourced by the jobs of this folder, each of which is called as
#
#   ci/gpu/JOB.sh [gpu|cpu] [STEP...]
#
# `cpu` is a dry run: the same steps with the CPU twins of the profiles, cut to a few requests. STEPs are the only ones to
# run. Variables: HARNESS, the command (`harness`); ENGINE, settings of this machine that every profile gets, such as
# '{gpu_memory_utilization: 0.06, env: {VLLM_USE_FLASHINFER_SAMPLER: "0"}}'; KEEP, the folder of what is to be kept
# (reports/gpu-jobs/JOB, emptied first): a log and a compressed record of each step, baselines, and steps.tsv (step, exit
# code, seconds, limit, command).
# A step that reaches its limit gets TERM, and KILL a minute later; the next one runs all the same. The job itself may be
# ended with TERM: its step ends, and what is complete is packed. Exit code: that of the first step that did not exit
# with 0 (124: its limit), 64 for wrong usage.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
job="$(basename "$0" .sh)"
device="${1:-gpu}"
[ $# -eq 0 ] || shift
only=("$@")
case "$device" in
  gpu | cpu) ;;
  *) printf "%s: expected gpu or cpu, found '%s'\n" "$job" "$device" >&2; exit 64 ;;
esac
read -r -d '' -a harness <<<"${HARNESS:-harness}" || true
keep="${KEEP:-reports/gpu-jobs/$job}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
rm -rf "${keep:?}"/*
mkdir -p "$keep"
worst=0 current="" stopped=no steps=()
trap 'stopped=yes; [ -z "$current" ] || kill -TERM "$current"' TERM INT

# into PROFILE: the options that let `baseline record` write where runs look; a dry run leaves the shipped ones alone.
into() { [ "$device" = gpu ] || printf '%s\n' --baselines "$work/baselines"; }

# on_this_machine PROFILE: its name, or the file of a profile that extends it, in a dry run with a prompt of each stratum.
on_this_machine() {
  if [ "$device" = gpu ] && [ -z "${ENGINE:-}" ]; then printf '%s' "$1"; return; fi
  {
    printf 'extends: %s\nname: %s\n' "$1" "$1"
    [ -z "${ENGINE:-}" ] || printf 'engine: %s\n' "$ENGINE"
    [ "$device" = gpu ] || printf 'workload: {per_stratum: 1, text_prompts: 0}\n'
  } >"$work/$1.yaml"
  printf '%s' "$work/$1.yaml"
}

# pack NAME FOLDER: what is there becomes NAME.tar.xz, in pieces of 15 MiB where it is larger.
pack() {
  [ -e "$2" ] || return 0
  rm -f "$keep/$1.tar.xz"*
  tar -C "$(dirname "$2")" --exclude latest -c "$(basename "$2")" | xz -T0 | split -b 15M - "$keep/$1.tar.xz."
  [ -e "$keep/$1.tar.xz.ab" ] || mv "$keep/$1.tar.xz.aa" "$keep/$1.tar.xz"
}

# step NAME SECONDS ARGUMENTS: harness with a limit; what it recorded is packed at once.
step() {
  local name="$1" limit="$2" code began="$SECONDS" wanted
  shift 2
  steps+=("$name")
  if [ "${#only[@]}" -gt 0 ]; then
    for wanted in "${only[@]}"; do [ "$wanted" != "$name" ] || break; done
    [ "$wanted" = "$name" ] || return 0
  fi
  [ "$stopped" = no ] || return 0
  local words=() word previous=""
  for word in "$@"; do
    [ "$previous" != --profile ] || word="$(on_this_machine "$word")"
    words+=("$word")
    previous="$word"
  done
  # Only harness gets the signal: it ends its engines itself, and writes what is complete.
  timeout --foreground --signal=TERM --kill-after=60 "$limit" "${harness[@]}" "${words[@]}" --out "$work/$name" \
    >"$keep/$name.log" 2>&1 &
  current=$!
  # A signal to this script ends a wait, not the step; of one that has ended, another wait tells the same.
  wait "$current" || true
  while kill -0 "$current" 2>/dev/null; do wait "$current" || true; done
  code=0
  wait "$current" || code=$?
  current=""
  printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - began))" "$limit" "$*" | tee -a "$keep/steps.tsv"
  pack "$name" "$work/$name"
  [ "$worst" -ne 0 ] || worst="$code"
}

# each_way: records what $alone of $usual says, where baselines/gpu is empty, and runs $profile in each of $ways.
# Reads $few (more options of a run), $cells (those of a CPU dry run) and $limits (seconds of the record and of a way).
each_way() {
  local way into chosen
  mapfile -t into < <(into)
  if [ "$device" = cpu ] || ! compgen -G 'baselines/gpu/*.json' >/dev/null; then
    step record "${limits[0]}" baseline record --profile "$usual" "${alone[@]}" "${into[@]}"
  else
    steps+=(record)
  fi
  for way in "${ways[@]}"; do
    chosen=(--cell "*+$way")
    [ "$device" = gpu ] || chosen=("${cells[@]}")
    step "$way" "${limits[1]}" run --profile "$profile" "${chosen[@]}" "${few[@]}"
  done
}

# finish PROFILE...: packs the baselines of these profiles that the job recorded, and exits.
finish() {
  local profile wanted
  for profile in "$@"; do
    [ "$device" = cpu ] || pack "baselines-$profile" "baselines/$profile"
  done
  pack baselines "$work/baselines"
  for wanted in "${only[@]}"; do
    [[ " ${steps[*]} " == *" $wanted "* ]] ||
      { printf "%s: expected steps among %s, found '%s'\n" "$job" "${steps[*]}" "$wanted" >&2; exit 64; }
  done
  if [ "$stopped" = yes ] && [ "$worst" -eq 0 ]; then worst=143; fi
  exit "$worst"
}
