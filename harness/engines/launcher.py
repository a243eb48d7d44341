"""Starts the engines of a group in their places, and ends them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from harness import redact
from harness.engines.api_key import ApiKey
from harness.engines.attached import AttachedEngine, Front
from harness.engines.client import Client
from harness.engines.command import EngineCommand, NotesOfKV, build_command
from harness.engines.environment import EngineEnvironment
from harness.engines.event_log import EventLog
from harness.engines.executor import lone_places
from harness.engines.mutation import Mutation
from harness.engines.places import EngineHandle, Place, Places, end_and_report
from harness.errors import EngineDiedError, EngineStartError, HandoffError, RequestTimeoutError
from harness.profiles.cells import SECOND_P, EngineGroup, Role
from harness.profiles.model import Profile
from harness.supervision.process import SupervisedEngine
from harness.supervision.server import LOOPBACK
from harness.supervision.stacks import StackFiles

Progress = Callable[[str], None]


class Launcher:
    """The processes and clients of a group's engines, by role. They may be ended from another thread."""

    def __init__(
        self, group: EngineGroup, profile: Profile, logs: Path, kv_folder: Path, key: ApiKey, progress: Progress
    ) -> None:
        self._group = group
        self._profile = profile
        self._logs = logs
        self._kv_folder = kv_folder
        self._key = key
        self._progress = progress
        self._stacks = StackFiles(logs, group.id, progress)
        self._end_reason = ""
        self._event_logs: list[EventLog] = []
        self.places: Places = {}
        self.processes: dict[Role, EngineHandle] = {}
        self.clients: dict[Role, Client] = {}
        self.side_channels: dict[Role, int | None] = {}
        """Ports of the NIXL side channels."""
        self.ended = False
        """Whether the engines were ended from another thread: their answers are no longer evidence."""

    def start(self, environment: EngineEnvironment, mutation: Mutation, places: Places | None) -> None:
        """Start the engines without waiting until they are ready; without ``places``, on this machine. Raises
        EngineStartError when one cannot be started, EngineDiedError when they are being ended meanwhile."""
        self.places = places or lone_places(self._group, self._profile, self._progress)
        self._build = partial(self._command, environment=environment, mutation=mutation)
        commands = [self._build(role, place) for role, place in self.places.items()]
        for command in commands:
            self.require_not_ended()
            self._start_engine(command)

    def start_second_p(self) -> None:
        """Start another P on the devices of the first one, without waiting until it is ready. Raises as ``restart``
        does."""
        self._require_own("prefill", "start another one like")
        self.places = {**self.places, SECOND_P: self.places["prefill"]}
        self._start_engine(self._build("prefill", self.places[SECOND_P])._replace(role=SECOND_P))

    def _command(self, role: Role, place: Place, environment: EngineEnvironment, mutation: Mutation) -> EngineCommand:
        """Build the command of an engine; its ports are picked on the machine where it will run."""
        # vLLM 0.32 listens on the first side channel only; earlier versions on one per rank, from the first on.
        ranks = self._profile.engine.devices_of(role)
        environment = environment.of(role)
        port, *side_channel = place.ports(1 if role == "single" else 1 + ranks)
        return build_command(
            self._profile,
            self._group.method_of(role),
            role,
            environment,
            port=port,
            side_channel_port=side_channel[0] if side_channel else None,
            devices=place.devices,
            host=place.host,
            extra_env=mutation.environment(role, environment.prefix),
            key=self._key,
            witness=self._witness(role),
            events=self._subscribed(role, place),
        )

    def _witness(self, role: Role) -> NotesOfKV | None:
        """Return where an engine notes what its KV caches hold; None unless the profile asks."""
        if self._profile.witness == "off":
            return None
        self._kv_folder.mkdir(parents=True, exist_ok=True)
        return NotesOfKV(self._kv_folder.resolve(), f"{self._group.id}.{role}")

    def _subscribed(self, role: Role, place: Place) -> str | None:
        """Return where an engine publishes its KV events, to a subscriber of its own; None unless the profile asks.
        Raises EngineStartError for an engine of another machine."""
        if not self._profile.engine.kv_events:
            return None
        if place.host != LOOPBACK:
            raise EngineStartError(
                f"{self._group.id}: expected engines on this machine, to whose KV events the harness subscribes "
                f"(engine.kv_events), found the {role} engine on {place.host}; leave engine.kv_events out"
            )
        log = EventLog(self._kv_folder.resolve(), f"{self._group.id}.{role}")
        self._event_logs.append(log)
        return log.endpoint

    def _start_engine(self, command: EngineCommand) -> None:
        role = command.role
        process = self.places[role].start(command, self._logs / f"{self._group.id}.{role}.log")
        self.processes[role] = process
        self.side_channels[role] = command.side_channel_port
        timeout_s = self._profile.timeouts.request
        if isinstance(process, AttachedEngine):
            server = process.server
            self.clients[role] = Client(role, process.url, timeout_s, server.key, server.model)
            self._progress(f"{self._group.id}: attached to {role} server, {process.url}, model {server.model}")
            return
        self.clients[role] = Client(role, process.url, timeout_s, self._key)
        self._progress(f"{self._group.id}: started {role} engine, pid {process.pid}, {process.url}")

    def restart(self, role: Role) -> list[str]:
        """End an engine and start it again with the same command; return descriptions of what is left of the first.

        Raises HandoffError when this harness did not start it on this machine, EngineStartError when it cannot be
        started, EngineDiedError when the engines are being ended meanwhile.
        """
        process = self._require_own(role, "restart")
        left = process.restart(self._profile.timeouts.stop)
        self._progress(f"{self._group.id}: restarted {role} engine, pid {process.pid}, {process.url}")
        return left

    def _require_own(self, role: Role, verb: str) -> SupervisedEngine:
        """Return an engine that this harness started on this machine. Raises HandoffError when it did not,
        EngineDiedError when the engines are being ended."""
        self.require_not_ended()
        process = self.processes[role]
        if isinstance(process, SupervisedEngine):
            return process
        raise HandoffError(
            f"the harness cannot {verb} the {role} engine, which it did not start on this machine; leave the "
            "scenario out"
        )

    @property
    def attached_router(self) -> Front | None:
        """The router that runs already in front of servers that do."""
        return next((p.router for p in self.processes.values() if isinstance(p, AttachedEngine)), None)

    def require_not_ended(self) -> None:
        """Raise EngineDiedError when the engines were ended from another thread."""
        if self._end_reason:
            raise EngineDiedError(self._end_reason)
        if self.ended:
            raise EngineDiedError(f"{self._group.id}: its engines were ended from outside")

    def first_gone(self) -> tuple[Role, EngineDiedError] | None:
        """Return an engine that ended by itself, with its end; None if there is none, or all are being ended."""
        if self.ended:
            return None
        for role, process in self.processes.items():
            try:
                process.require_alive()
            except EngineDiedError as error:
                return role, error
        return None

    def require_alive(self) -> None:
        """Raise EngineDiedError when an engine is gone or is being ended, even if it is still alive."""
        self.require_not_ended()
        for process in self.processes.values():
            process.require_alive()

    def dump_stacks(self, cause: str) -> None:
        """Write the stacks of the engines' Python processes beside their logs, once per engine and cause."""
        # Copied, because ``release`` may clear the engines in another thread.
        running = tuple(self.processes.items())
        self._stacks.dump({role: process.python_processes for role, process in running}, cause)

    def dump_stacks_on_timeout(self, error: BaseException | None, cause: str) -> None:
        """Write the stacks when a request timed out, unless the engines are being ended anyway."""
        if isinstance(error, RequestTimeoutError) and not self.ended:
            self.dump_stacks(cause)

    def mark_ended(self, reason: str = "") -> None:
        """Make all further use of the engines raise EngineDiedError, with ``reason`` as its message if given."""
        if reason:
            self._end_reason = reason
        self.ended = True

    def end(self) -> list[str]:
        """End all engines at the same time, killing those that ignore TERM for the grace period.

        Return descriptions of what is left of them.
        """
        grace_s = self._profile.timeouts.stop
        ends = [(f"the {role} engine", partial(p.stop, grace_s)) for role, p in self.processes.items()]
        with ThreadPoolExecutor(max(1, len(ends))) as pool:
            asked = [pool.submit(end_and_report, *end) for end in ends]
        return [words for left in asked for words in left.result()]

    def disconnect(self) -> None:
        """Close the connections to the engines."""
        for client in self.clients.values():
            client.close()

    def release(self) -> None:
        """Release the places of ended engines, remove secrets from their logs, and forget them."""
        while self._event_logs:
            self._event_logs.pop().close()
        for place in self.places.values():
            place.give_back()
        # The logs are final now. A disk error must not hide why the engines ended.
        for process in self.processes.values():
            with contextlib.suppress(OSError):
                redact.file(process.log_path)
        self.processes.clear()
        self.clients.clear()
