"""An engine's environment, its command line and a client, without an engine."""

from __future__ import annotations

from pathlib import Path

from harness.engines.command import EngineCommand, build_command
from harness.engines.environment import EngineEnvironment
from harness.engines.session import EngineGroupSession
from harness.errors import HandoffError
from harness.history.records import Leg
from harness.profiles.cells import EngineGroup, make_plan, select_cells
from harness.profiles.load import load_profile
from harness.profiles.model import Profile

ENVIRONMENT = EngineEnvironment(
    executable="/somewhere/bin/python",
    python="3.11.0",
    prefix="/somewhere",
    vllm="0.32.0",
    vllm_build="cpu",
    torch="2.13.0",
    transformers="5",
    nixl="1.5.1",
)


def option(command: EngineCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def command_of(
    role: str = "decode",
    profile: Profile | str = "cpu",
    kind: str = "none",
    environment: EngineEnvironment = ENVIRONMENT,
    **place: object,
) -> EngineCommand:
    """The command of an engine with this method, on ports 1000 and 1001."""
    known = load_profile(profile) if isinstance(profile, str) else profile
    method = next(m for m in known.methods if m.kind == kind)
    ports = {"port": 1000, "side_channel_port": None if role == "single" else 1001}
    return build_command(known, method, role, environment, **{**ports, **place})


def group_of(cell: str, profile: Profile | str = "cpu") -> EngineGroup:
    """The engines of a cell, or of cells that share them."""
    known = load_profile(profile) if isinstance(profile, str) else profile
    (group,) = make_plan(known, select_cells(known, [cell])).groups
    return group


def session_of(cell: str, folder: Path, **more: object) -> EngineGroupSession:
    """A session with the engines of a cell of the cpu profile, none of which is started."""
    return EngineGroupSession(group_of(cell), load_profile("cpu"), ENVIRONMENT, folder, **more)


class FakeClient:
    """Answers at once and notes in which order it was asked."""

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role = role
        self.calls = calls
        self.last_snapshot: dict[str, float] = {}
        self.fails = False
        self.asked: list[tuple[object, object]] = []
        """Prompt and hand-off parameters of each request."""

    def complete(self, prompt, sampling, request_id, salt, parameters=None, count=True, **_):
        self.calls.append(f"{self.role} asked")
        self.asked.append((prompt, parameters))
        if self.fails:
            raise HandoffError("expected an answer, found none")
        given = {"remote_block_ids": [[1]]} if (parameters or {}).get("do_remote_decode") else None
        counters = {"own": 1.0} if count else {}
        return Leg(role=self.role, request_id=request_id, kv_transfer_params=given, counters=counters)

    def counters_after(self, before, awaited):
        self.calls.append(f"{self.role} counted")
        return {"finished_requests": 1.0}
