"""Reads servers that run already, and makes a profile of what they tell, with what they cannot do left out."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.commands.attach.compose import Wanted, answering, base_name, changes, text_of, with_cells, with_topologies
from harness.commands.attach.told import Told, contradictions, table, told_by
from harness.engines.answers import Sampling
from harness.engines.attached import AttachedExecutor, Front, Server
from harness.engines.client import Client
from harness.engines.needs import Needs
from harness.engines.request import new_id
from harness.errors import HandoffError, UsageError
from harness.history.engine_interfaces import PAUSE, PER_REQUEST_FLAG
from harness.judging.power import lookups_now
from harness.profiles.cells import Role
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.profiles.scenarios import Scenario
from harness.prompts.model import Prompt, load_prompts
from harness.scenarios.kinds import kind_of
from harness.workload.prepare import Prepared, prepare
from harness.workload.scripts import scripts

_ANSWERED_S = 60.0
_LOGPROBS = 2
"""Log-probs of a position that are asked for: what judging needs."""


class Attachment(NamedTuple):
    """A profile for servers that run already, and what a person has to know of it."""

    text: str
    rows: list[tuple[str, ...]]
    """What each server tells, for a table; the first column names it."""
    trust: tuple[str, ...]
    left_out: Mapping[str, str]
    """Scenarios of the extended profile that these servers cannot be asked, with the reason."""
    notes: tuple[str, ...]
    options: tuple[str, ...]
    """The options that name the servers on a command line."""


class Answered(NamedTuple):
    """What one short request showed."""

    problem: str = ""
    per_request: bool = True
    """Whether the answer says which drafts were accepted."""


def attach(servers: Mapping[Role, Server], router: Front | None, wanted: Wanted) -> Attachment:
    """Return a profile that has the settings of these servers. Raises UsageError that names every reason for which they
    cannot be judged together, and ProfileError or UsageError where the profile to extend does not do."""
    told = {role: told_by(server) for role, server in servers.items()}
    answers = {role: _ask(server) for role, server in servers.items()}
    if problems := [*contradictions(told), *(a.problem for a in answers.values() if a.problem)]:
        raise UsageError("these servers cannot be judged together:\n" + "\n".join(f"  {words}" for words in problems))
    source = base_name(told, wanted)
    base = load_profile(source)
    if base.axes:
        raise UsageError(f"--extends {source}: the profile has axes, and servers have one model; name another one")
    found = changes(told, base, source, wanted)
    if (device := found.raw.get("engine", {}).get("device")) is not None:
        raise UsageError(f"--extends {source}: its engines run on {base.engine.device}, the servers on {device}")
    routed = router is not None
    raw = with_topologies(found.raw, told, routed)
    with _draft(raw, wanted.folder) as draft:
        profile = load_profile(draft)
    raw = with_cells(raw, told, found.kind, profile, routed)
    left_out = {} if found.other_models else dict(_impossible(profile, told))
    if left_out:
        raw["without_scenarios"] = list(left_out)
    trust, notes = [f"taken on trust: {words}" for words in found.trust], list(_of_answers(told, answers))
    with _draft(raw, wanted.folder) as draft:
        if found.other_models:
            load_profile(draft)
            notes.append("prompts and baselines of these models are made by `harness run --prepare`, or by hand")
        else:
            prepared = prepare(draft, [], running=True)
            executor = AttachedExecutor(servers, router)
            executor.require_fit(prepared.plan, prepared.profile, prepared.works)
            trust = [*executor.on_trust(prepared.plan, prepared.profile), *trust]
            notes += _without_baseline(prepared, answering(told).server.version)
    options = [word for role, server in servers.items() for word in (f"--{role}", server.url)]
    options += ["--router", router.url] if router is not None else []
    comments = [*trust, *(f"left out: {scenario}: {why}" for scenario, why in left_out.items())]
    text = text_of(raw, comments)
    return Attachment(text, table(told), tuple(trust), left_out, tuple(notes), tuple(options))


@contextlib.contextmanager
def _draft(raw: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Write a profile where its paths hold, for as long as the context lasts. Raises UsageError if it cannot be."""
    try:
        handle, name = tempfile.mkstemp(prefix=".harness-attach-", suffix=".yaml", dir=folder)
    except OSError as error:
        raise UsageError(f"expected to write a profile into {folder}, but that failed ({error.strerror})") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text_of(raw, []))
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


def _ask(server: Server) -> Answered:
    """Ask a server for two tokens, as judging does: with their ids and log-probs."""
    client = Client("single", server.url, _ANSWERED_S, server.key, server.model)
    which = f"--{server.option} {server.url}"
    try:
        leg = client.complete([1, 2, 3], Sampling(2, _LOGPROBS), new_id(), new_id(), count=False)
    except HandoffError as error:
        return Answered(f"{which} does not answer a request of three tokens: {error}")
    finally:
        client.close()
    if leg.output_ids is None or leg.echoed_ids is None:
        return Answered(f"{which} does not return token ids (return_token_ids), by which answers are judged")
    return Answered("", leg.speculation is not None)


def _of_answers(told: Mapping[Role, Told], answers: Mapping[Role, Answered]) -> Iterator[str]:
    for role, server in told.items():
        if server.drafts and not answers[role].per_request and role != "prefill":
            yield (
                f"--{role} {server.server.url}: acceptance is compared in total; start the server with "
                f"{PER_REQUEST_FLAG} detailed to compare each step"
            )


def _impossible(profile: Profile, told: Mapping[Role, Told]) -> Iterator[tuple[str, str]]:
    """Yield the scenarios that cannot be brought about on these servers, each with the reason."""
    prompts = {p.id: p for p in load_prompts(profile.workload.prompts).prompts}
    for scenario in profile.scenarios:
        if set(scenario.topologies).isdisjoint(profile.topologies):
            continue
        if reason := _why_not(scenario, profile, told, prompts):
            yield scenario.id, reason


def _why_not(
    scenario: Scenario, profile: Profile, told: Mapping[Role, Told], prompts: Mapping[str, Prompt]
) -> str | None:
    servers = [t.server for t in told.values()]
    if problem := kind_of(scenario).impossible(scenario, profile, prompts):
        return problem
    played = [script for topology in profile.topologies for script in scripts(scenario, prompts, topology)]
    if any(send.restart or send.by_second_p for script in played for send in script.sends):
        return "it restarts engines or starts more of them, which is not done to servers that run already"
    held = any(stage.hold is not None for script in played for stage in script.stages)
    if held and not all(s.surfaces[PAUSE] for s in servers):
        return "it queues requests at a server that is paused; start the servers with VLLM_SERVER_DEV_MODE=1"
    needs = Needs.of_scripts(played, profile.workload.max_tokens)
    step = profile.engine.max_num_batched_tokens
    if step is not None and needs.of_more_than(step) and any(s.info.facts.step_tokens is None for s in servers):
        return "a server does not tell how many tokens fit into one step; start it with VLLM_SERVER_DEV_MODE=1"
    lacking = [words.replace(f" for {scenario.id}", "") for s in servers for words in s.info.lacks(profile, needs)]
    return f"it needs {lacking[0]}" if lacking else None


def _without_baseline(prepared: Prepared, version: str) -> Iterator[str]:
    judged = {cell.name.lineup for cell in prepared.plan.cells}
    for lineup, lookup in lookups_now(prepared, version or None).items():
        if lineup in judged and lookup.baseline is None:
            yield (
                f"no baseline of {lineup} with these settings; `harness baseline record -p FILE -c single-{lineup} "
                "--single URL` records one from an engine alone"
            )
