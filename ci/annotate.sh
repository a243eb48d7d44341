# Sourced: annotate CONTEXT STYLE FILE shows a Markdown file on the page of the build. It cannot fail a step.
annotate() {
  [ -f "$3" ] || return 0
  if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    cat "$3" >>"$GITHUB_STEP_SUMMARY" || printf 'ci: the summary could not be written\n' >&2
  elif [ -n "${BUILDKITE:-}" ] && command -v buildkite-agent >/dev/null 2>&1; then
    buildkite-agent annotate --context "$1" --style "$2" <"$3" || printf 'ci: the build could not be annotated\n' >&2
  fi
}
