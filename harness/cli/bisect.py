"""``harness bisect``."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.options import OutOption, ProfileOption, make_console
from harness.cli.target import (
    CellOption,
    FindingArgument,
    PromptOption,
    RateOption,
    RunArgument,
    ScenarioOption,
    TrustOption,
    run_and_finding,
    what_to_try,
)
from harness.errors import UsageError


def bisect_command(
    good: Annotated[
        str,
        typer.Option(
            "--good", metavar="VERSION|PYTHON", help="The older end, without the defect: 0.30.0, or an interpreter."
        ),
    ],
    bad: Annotated[str, typer.Option("--bad", metavar="VERSION|PYTHON", help="The newer end, with the defect.")],
    run_dir: RunArgument = None,
    finding: FindingArgument = None,
    cell: CellOption = None,
    prompt: PromptOption = None,
    scenario: ScenarioOption = "cold",
    profile: ProfileOption = "cpu",
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            metavar="VERSION|PYTHON",
            help="An intermediate version. Repeatable. Default: every release between the ends, or none when both ends "
            "are interpreters.",
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat",
            "-n",
            metavar="N",
            min=1,
            max=10_000,
            help="Maximum attempts per version: one that shows the defect makes it bad; it is good once the quiet ones "
            "exclude the rate of the run. Default: 60.",
        ),
    ] = None,
    rate: RateOption = None,
    trust_code: TrustOption = False,
    out: OutOption = None,
) -> None:
    """Find the first vLLM version in which a finding shows, by binary search with repro as the test.

    Versions are installed into a cache, both ends are tried first, and versions that cannot start or are inconclusive
    are skipped. Exit code 0 when the first bad version is found (or a few that it is among), 2 when undecided.
    """
    run, finding = run_and_finding(run_dir, finding, cell, prompt, scenario)
    from harness.commands.bisect.environments import (
        DISTRIBUTIONS,
        in_order,
        installed,
        read_candidate,
        release,
        released_versions,
    )
    from harness.commands.bisect.run import VersionTrier, expected_total_s, print_bisection, start
    from harness.commands.bisect.run import bisect as search_versions
    from harness.commands.repro import MOST_TRIES
    from harness.runner.run import new_folder
    from harness.util.paths import DEFAULT_OUT
    from harness.util.progress import Reporter

    prepared, target, mutants = what_to_try(run, finding, cell, prompt, scenario, profile, trust_code, rate)
    most = repeat or MOST_TRIES
    if most < target.goal.tries:
        raise UsageError(
            f"--repeat: expected at least {target.goal.tries} attempts per version, which exclude {target.goal.words} "
            f"when they are quiet, found {most}, with which no version could be called good; give --repeat "
            f"{target.goal.tries}, or --rate if it shows more often than that"
        )
    device = prepared.profile.engine.device
    package = DISTRIBUTIONS[device]
    candidates = in_order(
        read_candidate("--good", good),
        read_candidate("--bad", bad),
        [read_candidate("--candidate", c) for c in candidate or []],
        lambda: released_versions(package),
    )
    folder = new_folder(out or DEFAULT_OUT, prepared.profile, "bisect")
    with Reporter(expected_total_s(prepared, target.goal.tries, len(candidates))) as reporter:
        reporter.line(f"{len(candidates)} versions from {candidates[0].version} to {candidates[-1].version}")
        cache = installed(device, reporter.line)
        trier = VersionTrier(
            prepared, target, mutants, most, lambda version, log: cache.python(release(package, version), log), reporter
        )
        begun = start(prepared, target, mutants, candidates, most)
        found = search_versions(begun, candidates, folder, trier, reporter.line)
    console = make_console()
    print_bisection(found, console)
    console.print(f"steps: {folder / 'bisect.json'}", soft_wrap=True, highlight=False)
    raise typer.Exit(found.exit_code)
