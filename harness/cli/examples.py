"""Examples that the help of each command ends with.

A line is ``command  # what it does``, without ``harness`` before it; tests hold that each is understood.
"""

from __future__ import annotations

_GROUPS = ("list", "baseline", "prompts", "prompts build", "probe", "ci")
"""Commands whose name is followed by that of one of theirs."""

_LINES = """\
run --quick  # a first answer in minutes
run -c pd-eagle3 -s cold  # one cell, cold prompts only
run --engine-python ~/vllm/.venv/bin/python --engine-arg=--my-flag
run --resume reports/latest  # go on after an interruption
doctor  # can the cpu profile run here?
doctor -p nightly --engine-python ~/vllm/.venv/bin/python
plan  # cells, minutes, what can be detected
plan -p nightly -c 'pd-*' --effect 0.5
plan --commands -c pd-eagle3  # start the pair by hand
plan --full > my-profile.yaml  # every setting
init --target Qwen/Qwen3-4B --drafter me/x --method eagle3 > mine.yaml
init --target ~/models/x --method ngram --device cpu --out m.yaml
attach --prefill http://p:8000 --decode http://d:8000 --out mine.yaml
attach --single http://s:8000 --extends gpu  # prints the profile
ab --base 0.31.0 --head 0.32.0 -c 'pd-*'
ab --base ~/main/.venv/bin/python --head ~/branch/.venv/bin/python
ab --engine-arg=--my-flag  # the same vLLM, with and without it
fuzz  # five minutes of random traces
fuzz --minutes 60 --seed 7 -c 'pd-*'
up pd-eagle3  # serve a pair until Ctrl-C
up pd-eagle3 --port 8000 -p my-profile.yaml
check  # judge the latest run again
check reports/RUN --against reports/OTHER_RUN
check reports/latest --json | jq .verdict
report reports/RUN  # write its pages again
report --compare reports/RUN reports/OTHER_RUN
report --compare reports/RUN --json | jq .cells
trend reports  # verdicts and slow drifts of all runs
trend reports --out pages --json
merge parts --out merged  # one verdict over all parts
merge parts --out merged --expect nightly --keep-going
repro pd-eagle3/transfer  # a finding of the latest run
repro reports/RUN FINDING --shrink --export case.py
repro -c pd-eagle3 --prompt aligned --keep
bisect FINDING --good 0.30.0 --bad 0.32.0
bisect reports/RUN FINDING --good 0.30.0 --bad 0.32.0 --repeat 143
bisect -c pd-eagle3 --prompt aligned --good a/python --bad b/python
selftest --quick  # the historic defects
selftest M1 N5  # only these faults
selftest --method mtp  # with another drafter
aa --repeat 20  # how often do equal runs differ?
aa -c pd-eagle3 -s 'prefix-*' --repeat 5
soak --minutes 480  # a night under load
soak -c pd-mtp --minutes 30 --concurrency 16
list profiles  # what --profile takes
list profiles --json | jq -r '.[].profile'
list cells  # what --cell selects
list cells -p nightly --json | jq -r '.[].cell'
list scenarios  # what --scenario selects
list scenarios -p cpu-full
list faults  # what --mutant takes
list faults --json | jq -r '.[].fault'
list findings  # of the latest run, for repro and bisect
list findings reports/RUN --json | jq -r '.[].id'
models -p nightly  # sizes, licences, what is cached
models -p nightly -c 'pd-eagle3*' --download
baseline record -p gpu  # everything twice, with noise (A/A)
baseline record --from reports/RUN --again reports/OTHER_RUN
baseline accept reports/RUN  # an intended change
baseline accept reports/RUN --again reports/OTHER_RUN
baseline diff old/eagle3.json baselines/cpu/eagle3.json
baseline diff old baselines/cpu  # all of a folder
baseline list  # those of the cpu profile
baseline list -p gpu --json | jq .problems
prompts build copy --overwrite  # prompts/probe.jsonl anew
prompts build copy --block-size 16 --per-length 8 --out more.jsonl
prompts build echo --tokenizer models/mine --out mine.jsonl
prompts build natural --for-profile mine.yaml --out mine.jsonl
prompts build natural --tokenizer models/x --file q.txt --out x.jsonl
prompts build recipe -p nightly  # the sets of its recipes
prompts build recipe -p mine.yaml --overwrite
probe measure  # from the latest run
probe measure reports/RUN --out quality.json
ps  # what runs, and what a crash left
ps --json | jq
clean  # stop and remove what a crash left
clean --logs reports  # and redact secrets in its logs
ci engines 0.33.0 --device gpu  # prints its interpreter
ci engines ./vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl
ci matrix -p nightly  # the jobs for GitHub Actions
ci matrix -p nightly --gpus 8 --minutes-per-step 60
ci buildkite -p nightly --queue 'gpu-{gpus}'
ci buildkite -p nightly -c 'pd-*' | buildkite-agent pipeline upload
"""


def _by_command() -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for line in _LINES.splitlines():
        name, *words = line.split()
        while name in _GROUPS:
            name = f"{name} {words.pop(0)}"
        out.setdefault(name, []).append(line)
    return out


EXAMPLES = _by_command()
"""By the full name of the command."""
