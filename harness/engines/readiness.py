"""Waits until started engines can be judged: healthy, serving the right model, reachable for hand-offs, and warm."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from harness.engines.answers import Sampling
from harness.engines.api_key import require_guarded
from harness.engines.attached import READY_S, AttachedEngine
from harness.engines.launcher import Launcher, Progress
from harness.engines.listed_models import trouble
from harness.engines.mutation import Mutation
from harness.engines.request import Ask, Exchange, new_id
from harness.errors import EngineStartError, HandoffError
from harness.history.records import Leg
from harness.profiles.cells import EngineGroup, Role
from harness.profiles.model import Profile

_POLL_S = 0.25
_HANDSHAKE_PAUSE_S = 2.0
_QUIET_S = 15.0
"""Seconds of waiting after which it is said what is waited for."""


class Readiness:
    """Waits for the started engines of a group and warms them up, so that their answers count."""

    def __init__(
        self, group: EngineGroup, profile: Profile, launcher: Launcher, mutation: Mutation, progress: Progress
    ) -> None:
        self._group = group
        self._profile = profile
        self._launcher = launcher
        self._mutation = mutation
        self._progress = progress
        self.seconds: dict[Role, float] = {}
        """Seconds from the start of each engine until it was ready."""

    def wait(self, deadline: float, ready: Callable[[Role], object], roles: Collection[Role]) -> None:
        """Wait until these engines are ready and refuse requests without the key.

        ``deadline`` is in ``time.monotonic()``. ``ready`` is called with each engine that is, so that its threads that
        poll can leave the core on which another one is still loading its model.

        Raises EngineStartError when one is not ready in time or another server took its port, EngineDiedError when one
        ends, MutantRefusedError when a mutant ended it.
        """
        begun = time.monotonic()
        waiting = {role: self._deadline(role, begun, deadline) for role in roles}
        told = False
        while waiting:
            self._require_alive()
            lacking = {role: self.lacks(role) for role in waiting}
            for role, reason in lacking.items():
                if not reason:
                    del waiting[role]
                    self._note_ready(role)
                    ready(role)
                elif time.monotonic() > waiting[role]:
                    self._raise_not_ready(role, reason)
            if waiting and not told and time.monotonic() > begun + _QUIET_S:
                told = True
                words = "; ".join(f"{role} engine: {reason}" for role, reason in lacking.items() if reason)
                self._progress(f"{self._group.id}: waiting for the {words}")
            if waiting:
                time.sleep(_POLL_S)
        for role, process in self._launcher.processes.items():
            if isinstance(process, AttachedEngine):
                # Who may ask it was decided where it was started.
                continue
            require_guarded(process.url, f"the {role} engine of {self._group.id}")

    def _deadline(self, role: Role, begun: float, deadline: float) -> float:
        """Return until when an engine must be ready. One that runs already has nothing to load."""
        attached = isinstance(self._launcher.processes[role], AttachedEngine)
        return min(deadline, begun + READY_S) if attached else deadline

    def _note_ready(self, role: Role) -> None:
        self.seconds[role] = time.monotonic() - self._launcher.processes[role].started
        self._progress(f"{self._group.id}: {role} engine ready after {self.seconds[role]:.0f} s")

    def _require_alive(self) -> None:
        """Raise EngineDiedError when an engine is gone, MutantRefusedError when a mutant ended it."""
        self._launcher.require_not_ended()
        for role, process in self._launcher.processes.items():
            if not process.alive():
                self._mutation.require_not_refused(self._group.id, role, process.log_text())
                process.require_alive()

    def _raise_not_ready(self, role: Role, reason: str) -> None:
        process = self._launcher.processes[role]
        if isinstance(process, AttachedEngine):
            raise EngineStartError(
                f"expected the {role} server {process.url} to be ready within {READY_S:.0f} s, since it runs already, "
                f"found {reason}; see its log where it was started"
            )
        self._launcher.dump_stacks("start")
        raise EngineStartError(
            f"the {role} engine of {self._group.id} was not ready within {self._profile.timeouts.start:.0f} s "
            f"({reason}); raise timeouts.start or see {process.log_path}, which ends with:\n{process.log_tail()}"
        )

    def lacks(self, role: Role) -> str:
        """Return what an engine lacks to be asked: health, its list of models, its NIXL side channel; "" when nothing.

        Raises EngineStartError when another model answers behind its port.
        """
        return self._lacks_target(role) or self._lacks_side_channel(role)

    def _lacks_target(self, role: Role) -> str:
        client = self._launcher.clients[role]
        try:
            status = client.get("/health").status_code
            if status != httpx.codes.OK:
                return f"status {status} from /health"
            models = [m["id"] for m in client.get("/v1/models").json()["data"]]
        except httpx.HTTPError as error:
            return f"{trouble(error)} at {self._launcher.processes[role].url}"
        except (ValueError, KeyError, TypeError):
            return "no list of models at /v1/models"
        if client.model not in models:
            raise EngineStartError(
                f"expected the model {client.model!r} behind {self._launcher.processes[role].url}, found {models}; "
                "another server took the port"
            )
        return ""

    def _lacks_side_channel(self, role: Role) -> str:
        port = self._launcher.side_channels.get(role)
        if port is None:
            return ""
        address = (self._launcher.processes[role].command.host, port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
            return ""
        return f"no answer from its NIXL side channel, port {port}"

    def _warm_up_request(self) -> tuple[list[int], Sampling]:
        """Return a prompt of one block plus one token, and its sampling parameters."""
        ids = list(range(1, self._profile.engine.largest_block + 2))
        return ids, Sampling(max_tokens=8, logprobs=self._profile.workload.logprobs)

    def send_first_requests(self, deadline: float) -> None:
        """Send one plain request to every engine, all at the same time.

        The first request compiles kernels, so it may take what is left of the start timeout. Raises EngineStartError
        when one is not answered, EngineDiedError when an engine is gone.
        """
        limit = max(self._profile.timeouts.request, deadline - time.monotonic())
        ids, sampling = self._warm_up_request()
        clients = self._launcher.clients.values()
        with ThreadPoolExecutor(len(clients)) as pool:
            asked = [
                pool.submit(c.complete, ids, sampling, new_id(), new_id(), count=False, timeout_s=limit)
                for c in clients
            ]
        for answer in asked:
            self._launcher.dump_stacks_on_timeout(answer.exception(), "first request")
        self._launcher.require_alive()
        self._require_first_answers(asked)

    def _require_first_answers(self, asked: list[Future[Leg]]) -> None:
        for process, answer in zip(self._launcher.processes.values(), asked, strict=True):
            try:
                answer.result()
            except HandoffError as error:
                raise EngineStartError(
                    f"expected an answer to the first request of {self._group.id}, {error}{process.root_error()}"
                ) from error

    def warm_up_hand_off(self, exchange: Exchange, by_second_p: bool = False) -> None:
        """Do one full hand-off of a pair before anything is judged, with retries, because the NIXL handshake times out
        on busy machines. Raises EngineStartError when all attempts fail, EngineDiedError when an engine is gone."""
        if self._group.topology == "single":
            return
        ids, sampling = self._warm_up_request()
        attempts = self._profile.timeouts.handshake_attempts
        for attempt in range(1, attempts + 1):
            try:
                legs: list[Leg] = []
                exchange.send(Ask(True, ids, max_tokens=sampling.max_tokens, by_second_p=by_second_p), legs)
                # An engine that recomputes what it cannot fetch answers all the same.
                self._require_moved(legs[-1])
                return
            except HandoffError as error:
                self._launcher.dump_stacks_on_timeout(error, "warm-up")
                self._launcher.require_alive()
                if attempt == attempts:
                    raise self._no_hand_off(attempts, error) from error
                self._progress(f"{self._group.id}: NIXL handshake attempt {attempt} failed, retrying")
                time.sleep(_HANDSHAKE_PAUSE_S)

    def _require_moved(self, leg: Leg) -> None:
        if self._profile.engine.by_nixl and not leg.counters.get("nixl_bytes"):
            raise HandoffError("expected NIXL to move KV to the decode engine, found an answer without any")
        if not self._profile.engine.by_nixl and not leg.external_tokens:
            raise HandoffError(
                f"expected {self._profile.engine.kv_connector} to bring KV to the decode engine, found an answer "
                "without prompt tokens from outside"
            )

    def _no_hand_off(self, attempts: int, error: HandoffError) -> EngineStartError:
        decode = self._launcher.processes["decode"]
        return EngineStartError(
            f"expected a P/D hand-off within {attempts} attempts on {self._group.id}, found: {error}"
            f"{decode.root_error()}; last lines of the decode engine's log:\n{decode.log_tail()}"
        )
