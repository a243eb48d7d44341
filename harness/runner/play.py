"""Play a script on running engines and return the observations."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import Any

from harness.engines.client import Client
from harness.engines.counters import LATE_COUNTERS, credited, delta
from harness.engines.request import Ask, payload
from harness.engines.session import Broken, EngineGroupSession
from harness.errors import HandoffError, InfrastructureError
from harness.history.records import COLD, SUBJECT, Failure, Leg, Observation
from harness.profiles.cells import Cell, Role
from harness.profiles.scenarios import is_chat
from harness.prompts.messages import Messages, messages_of
from harness.scenarios.base import ORDER_S, Script, Send, Stage
from harness.util import clock
from harness.workload.features import feature_fields

_HOLD_S = 0.25
"""Seconds for which an engine is held after requests were sent, so that the API server has queued all of them."""
_PAUSE_S = 10.0
_AGEING = 4
"""Requests under way at once that make engines old; more do not make it faster on CPUs."""
_SHORT = 5
"""Tokens of their prompts."""
_END_S = 2.0
"""Seconds within which an engine ends when it is told that the client of a request is gone."""
_ARRIVE_S = 30.0
"""Seconds to wait for requests of a stage that may have failed."""


class SentRequest:
    """The state of a sent request: its legs so far, its start time, and its error."""

    def __init__(self) -> None:
        self.legs: list[Leg] = []
        self.started = clock.now()
        self.asked: float | None = None
        self.fields: Mapping[str, Any] = {}
        self.error: str | None = None
        self.aged_by: dict[str, int] = {}
        self.failure: Failure | None = None
        self.ended = False
        """Whether the engines cannot be asked any more."""

    @property
    def unanswered(self) -> bool:
        """Whether it was given up before there was an answer of the engine that gives the output."""
        return self.error is None and all(leg.role == "prefill" for leg in self.legs)

    def broke(self, broken: Broken | None) -> None:
        """Take in that there is no answer, unless ``broken`` is None."""
        if broken is not None:
            self.error, self.failure, self.ended = broken.error, broken.failure, broken.gone is not None


class SharedCounters:
    """The engines' counters over concurrent requests; created before the first of them is sent."""

    def __init__(self, session: EngineGroupSession, routed: bool) -> None:
        self._routed = routed
        self._pushes = session.profile.engine.pushes
        self._clients: dict[Role, Client] = {role: session.client(role) for role in session.roles}
        self._last = {role: client.last_snapshot for role, client in self._clients.items()}
        self._before = {role: client.snapshot() for role, client in self._clients.items()}

    def grown(self, legs: Iterable[Leg]) -> dict[str, dict[str, float]]:
        """Return the growth of each engine's counters, by role, once they include all of these answers."""
        answered = [leg.role for leg in legs]
        grown: dict[str, dict[str, float]] = {}
        for role, client in self._clients.items():
            asked = sum(self._asked(role, by) for by in answered)
            grown[role] = client.counters_after(self._before[role], {"finished_requests": asked})
            # Counters that an engine updates late are compared with the previous snapshot.
            late = delta(self._last[role], client.last_snapshot)
            grown[role] |= {name: late[name] for name in LATE_COUNTERS if name in late}
        if self._pushes and {"prefill", "decode"} <= grown.keys():
            grown["prefill"], grown["decode"] = credited(grown["prefill"], grown["decode"])
        return grown

    def _asked(self, role: Role, answered: str) -> bool:
        """Return whether ``role`` was asked for a leg answered by ``answered``; a router asks P before D."""
        if role == "prefill" and self._routed:
            return answered == "decode"
        return answered == role or (answered == "single" and role == "decode")


_NO_REFERENCE = "expected a hand-off before this request, whose parameters it repeats, found none answered"
_ALONE: dict[str, Role] = {
    "prefill": "prefill",
    "read-back": "prefill",
    "former-p": "decode",
    "reference": "decode",
}
"""The role under which an engine of a pair is asked alone, by route; D counts as the single engine otherwise."""


class Player:
    """Plays scripts for one cell."""

    def __init__(self, session: EngineGroupSession, cell: Cell) -> None:
        self._session = session
        self._cell = cell
        self._pair = cell.topology == "pd"
        self._routed = cell.routed
        self._params: dict[str, Any] | None = None
        """P's parameters of the last hand-off."""
        self._references: dict[str, dict[str, Any]] = {}
        """P's parameters of each hand-off of the script, by its part."""
        self._hung = False
        """Whether D has not answered a request in its time, and may hold its blocks for ever."""
        self._answered: dict[str, Any] | None = None
        """D's parameters of the last answer, if it keeps the blocks for P."""
        self._ended = False
        """Whether an engine of the group has ended."""

    def play(self, script: Script, sequence: int) -> Iterator[Observation]:
        """Yield the observations in the order of the script, up to those of the stage in which an engine of the group
        ended; ``sequence`` is the number of the first one."""
        salts: dict[str, str] = {}
        for number, stage in enumerate(script.stages, script.first):
            for send in (one for outer in stage.sends for one in (outer, *outer.between)):
                salts.setdefault(send.group, uuid.uuid4().hex)
            for observation in self._stage(script, number, stage, salts, sequence):
                if (prefill := observation.leg("prefill")) is not None:
                    self._params = prefill.kv_transfer_params or self._params
                    if prefill.kv_transfer_params:
                        self._references[observation.part] = prefill.kv_transfer_params
                self._answered = observation.final.kv_transfer_params if observation.final is not None else None
                yield observation
                sequence += 1
            if self._ended:
                return
            # What only brings the pair back to what it was has the pair to itself.
            self._heal(script.stages[number - script.first + 1 :])

    def _heal(self, left: Sequence[Stage]) -> None:
        """Start D again before the last request of a script in which it has not answered: that of a mistake is over."""
        if self._hung and not any(send.mistake for stage in left for send in stage.sends):
            self._hung = False
            # Servers that run already are not the harness's to end.
            with contextlib.suppress(HandoffError):
                self._session.restart_d()

    def _stage(
        self, script: Script, number: int, stage: Stage, salts: dict[str, str], sequence: int
    ) -> list[Observation]:
        alone = len(stage.sends) == 1
        inner: list[tuple[Send, SentRequest]] = []
        if alone and stage.sends[0].abandon is None:
            send = stage.sends[0]
            answer, shared = self._one(send, salts, inner)
            answers = [answer]
            if any(leg.ended_by_text for leg in answer.legs):
                # The API server has found a stop string; the engine goes on until it is told.
                self._session.settle()
            released = None
        else:
            answers, shared, released = self._several(stage, salts)
        if any(send.mistake for send in stage.sends):
            for answer in answers:
                # It may be the end of a request without an answer that ends the engine.
                answer.broke(self._session.end_of(_END_S) if answer.unanswered else None)
                self._hung = self._hung or answer.unanswered
        self._ended = any(answer.ended for answer in [*answers, *(row for _, row in inner)])
        if self._ended and all(answer.failure is None or answer.failure.by_itself for answer in answers):
            # A request ended it, which is on record; the others have to be sent, too.
            self._ended = not self._restarted()
        return [
            Observation(
                cell=self._cell.id,
                prompt_id=send.prompt.id,
                form=send.form,
                scenario=script.scenario,
                instance=script.instance,
                # A cold prompt is known by its id alone, however it is asked.
                part=SUBJECT if script.scenario == COLD else send.part,
                stage=number,
                route=send.route,
                max_tokens=send.max_tokens or self._session.profile.workload.max_tokens,
                temperature=send.temperature,
                asked_at=answer.asked,
                held_until=released,
                concurrent=len(stage.sends),
                abandon=send.abandon,
                feature=send.feature,
                fields=dict(answer.fields),
                api=send.api,
                mistake=send.mistake,
                shared_counters=shared,
                aged_by=answer.aged_by,
                sequence=sequence + i,
                sent_ids=send.prompt.ids,
                source=send.prompt.source,
                known_answer=send.prompt.expected,
                engine_roles=self._session.roles,
                legs=tuple(answer.legs),
                error=answer.error,
                failure=answer.failure,
                started_at=answer.started,
            )
            for i, (send, answer) in enumerate([*inner, *zip(stage.sends, answers, strict=True)])
        ]

    def _ask(self, send: Send, salts: dict[str, str], counted: bool) -> Ask:
        return Ask(
            hand_off=send.route == "cell" and self._pair,
            payload=self._payload(send),
            salt=salts[send.group],
            max_tokens=send.max_tokens,
            temperature=send.temperature,
            alone=_ALONE.get(send.route, "single"),
            counted=counted,
            routed=self._routed and send.route == "cell",
            abandon=send.abandon,
            former=self._former(send),
            as_given=send.restart or send.route == "reference",
            p_tokens=send.p_tokens,
            by_second_p=send.by_second_p,
            appended=send.appended,
            fields=self._fields(send, salts),
            read_back=self._answered if send.read_back else None,
            api=send.api,
        )

    def _payload(self, send: Send) -> list[int] | str | Messages:
        if not is_chat(send.api):
            return payload(send.prompt, "text" if send.api == "text" else send.form)
        messages = messages_of(self._session.profile, send.prompt)
        if messages is None:
            raise HandoffError(f"no messages are rendered to {send.prompt.id} by the chat template")
        return messages

    def _former(self, send: Send) -> dict[str, Any] | None:
        """Return the parameters that D is asked with alone; None if there are none."""
        if send.route == "former-p":
            return self._params
        given = self._references.get(send.reference) if send.route == "reference" else None
        return None if given is None else {name: value for name, value in given.items() if name != send.lost}

    def _restarted(self) -> bool:
        """Start the engines again that have ended; return whether they can be asked again."""
        try:
            self._session.restart_ended()
        except InfrastructureError:
            return False
        self._hung = False
        return True

    def _adapter_folder(self, send: Send) -> str:
        return str(self._session.profile.engine.adapters[send.adapter])

    def _fields(self, send: Send, salts: Mapping[str, str]) -> dict[str, Any]:
        if send.adapter:
            model = {"model": salts[send.group] if send.loads else send.adapter}
            return {**model, **({"cache_salt": None} if send.unsalted else {})}
        feature = send.feature
        if feature is None or feature == "first-adapter" or feature == "second-adapter":
            return {}
        return feature_fields(feature, send.prompt.expected or (), self._session.client("single").text_of)

    def _one(
        self, send: Send, salts: dict[str, str], inner: list[tuple[Send, SentRequest]]
    ) -> tuple[SentRequest, dict[str, dict[str, float]]]:
        """Send a request that has the engines to itself, and the requests between its legs, if any; return its answer
        and the counter growth. With requests between the legs, only P's counters are returned, grown over all."""
        answer = SentRequest()
        try:
            if send.restart:
                self._session.restart("prefill")
                answer.started = clock.now()
            if send.by_second_p:
                self._session.second_p()
                answer.started = clock.now()
            if send.loads:
                self._session.load_adapter(salts[send.group], self._adapter_folder(send))
                answer.started = clock.now()
            if send.ageing:
                answer.aged_by = self._grow_old(send)
                answer.started = clock.now()
            ask = self._ask(send, salts, counted=True)
            answer.fields = ask.fields
        except HandoffError as failure:
            answer.error = str(failure)
            return answer, {}
        if send.route == "former-p" and ask.former is None:
            answer.error = _NO_REFERENCE
            return answer, {}
        if send.read_back and ask.read_back is None:
            answer.error = (
                "expected D's previous answer to have kv_transfer_params, by which P reads D's blocks, found none"
            )
            return answer, {}
        if not send.between:
            broken, shared = self._session.ask_counted(ask, answer.legs)
            answer.broke(broken)
            return answer, shared
        prefill = self._session.client("prefill")
        before = prefill.last_snapshot

        def between() -> None:
            for other in send.between:
                row = SentRequest()
                inner.append((other, row))
                row.broke(self._session.attempt(self._ask(other, salts, counted=False), row.legs))

        answer.broke(self._session.attempt(ask._replace(between=between), answer.legs))
        if answer.ended:
            return answer, {}
        answered = sum(len(row.legs) for _, row in inner) + len(answer.legs[:1])
        grown = prefill.counters_after(before, {"finished_requests": answered})
        if self._session.profile.engine.pushes and answer.legs:
            grown, own = credited(grown, answer.legs[-1].counters)
            answer.legs[-1] = answer.legs[-1].model_copy(update={"counters": own})
        return answer, {"prefill": grown}

    def _grow_old(self, send: Send) -> dict[str, int]:
        """Send requests of one token, a few at a time, each with a cache of its own; return how many each engine
        finished. Raises HandoffError when one is not answered."""
        session = self._session
        counters = SharedCounters(session, self._routed)
        ask = Ask(
            hand_off=send.route == "cell" and self._pair,
            payload=list(send.prompt.ids[:_SHORT]),
            max_tokens=1,
            alone=_ALONE.get(send.route, "single"),
            counted=False,
            routed=self._routed and send.route == "cell",
        )

        def some(count: int) -> list[Leg]:
            legs: list[Leg] = []
            for n in range(count):
                mine: list[Leg] = []
                if problem := session.ask(ask, mine):
                    raise HandoffError(f"request {n + 1} of one token, to grow old: {problem}")
                legs += [Leg(role=leg.role, request_id=leg.request_id) for leg in mine]
            return legs

        together = min(_AGEING, session.profile.engine.max_num_seqs)
        shares = [len(range(n, send.ageing, together)) for n in range(together)]
        futures = [session.senders.submit(some, count) for count in shares if count]
        wait(futures)
        grown = counters.grown(leg for future in futures for leg in future.result())
        return {role: int(of.get("finished_requests", 0)) for role, of in grown.items()}

    def _several(
        self, stage: Stage, salts: dict[str, str]
    ) -> tuple[list[SentRequest], dict[str, dict[str, float]], float | None]:
        """Send the requests of a stage concurrently; return their answers, the growth of each engine's counters over
        all of them, and when the held engine was released."""
        session = self._session
        counters = SharedCounters(session, self._routed)
        answers = [SentRequest() for _ in stage.sends]
        gate = Gate(stage.sends, stage.p_in_turn)
        held = self._held(stage)
        if problem := self._hold(held):
            # Without the hold they would not meet in one step, which is the state that they are sent for.
            for answer in answers:
                answer.error = f"not sent: {problem}"
            return answers, {}, None
        futures = [
            session.senders.submit(self._timed, send, salts, answer, stage, gate)
            for send, answer in zip(stage.sends, answers, strict=True)
        ]
        released = None
        try:
            if held is not None:
                gate.wait_for_all()
                time.sleep(_HOLD_S)
        finally:
            # Release the engine on interruption too, or the threads would wait for it for ever.
            try:
                if held is not None:
                    self._release(held)
                    released = clock.now()
            finally:
                wait(futures)
        for future in futures:
            future.result()
        if any(answer.ended for answer in answers):
            return answers, {}, released
        try:
            if any(s.abandon is not None for s in stage.sends) or any(g.ended_by_text for a in answers for g in a.legs):
                session.settle()
            return answers, counters.grown(leg for a in answers for leg in a.legs), released
        except HandoffError:
            if not any(s.mistake for s in stage.sends):
                raise
            # An engine that ends because a client gives up tells no counters; that it has ended is looked for next.
            return answers, {}, released

    def _held(self, stage: Stage) -> Role | None:
        """Return the engine to hold at the start of a stage, or None."""
        if stage.hold is None:
            return None
        return "prefill" if self._pair and stage.hold == "first" else "single"

    def _timed(self, send: Send, salts: dict[str, str], answer: SentRequest, stage: Stage, gate: Gate) -> None:
        gate.wait_for_answers(send.after)
        if send.after_s:
            time.sleep(send.after_s)

        def ready() -> None:
            """Note that the answering engine is about to be asked."""
            if send.last:
                gate.wait_for_all(but=1)
                time.sleep(ORDER_S)
            answer.asked = clock.now()
            gate.arrived(send.part)

        try:
            try:
                ask = self._ask(send, salts, counted=False)._replace(turn=gate.turn)
            except HandoffError as failure:
                answer.error = str(failure)
                return
            answer.fields = ask.fields
            if send.route == "reference" and ask.former is None:
                answer.error = _NO_REFERENCE
                return
            # D is released when P has answered all requests. A router does not say when its P has answered.
            if stage.hold == "answering" and ask.hand_off and not self._routed:
                answer.started = clock.now()
                answer.broke(self._session.attempt(ask._replace(between=ready), answer.legs))
            else:
                ready()
                answer.started = clock.now()
                answer.broke(self._session.attempt(ask, answer.legs))
        finally:
            gate.answered(send.part)

    def _hold(self, role: Role | None) -> str | None:
        """Pause the engine's scheduler, keeping its running requests; return the error, or None.

        P pauses only when it keeps no blocks for D, which may take a lease after a hand-off that broke.
        """
        if role is None:
            return None
        kept_s = self._session.profile.engine.kv_lease_s if role == "prefill" else 0
        response = self._session.client(role).post("/pause?mode=keep&clear_cache=false", _PAUSE_S + kept_s)
        if response.status_code == 200:
            return None
        remedy = "; start the server with VLLM_SERVER_DEV_MODE=1" if response.status_code == 404 else ""
        return f"{role} engine: expected POST /pause?mode=keep to answer 200, found {response.status_code}{remedy}"

    def _release(self, role: Role) -> None:
        response = self._session.client(role).post("/resume")
        if response.status_code != 200:
            raise HandoffError(f"{role} engine: expected POST /resume to answer 200, found {response.status_code}")


class Gate:
    """Synchronises concurrent requests: lets the player wait until all have reached the held engine, and late requests
    wait for the answers of others."""

    def __init__(self, sends: Collection[Send], p_in_turn: bool = False) -> None:
        self.turn: AbstractContextManager[object] = threading.Lock() if p_in_turn else contextlib.nullcontext()
        """Held by the request that P is asked."""
        self._awaited = {send.part for send in sends if not send.after}
        self._changed = threading.Condition()
        self._answers = {send.part: threading.Event() for send in sends}

    def arrived(self, part: str) -> None:
        """Note that a request is on its way to the held engine."""
        with self._changed:
            self._awaited.discard(part)
            self._changed.notify_all()

    def wait_for_all(self, but: int = 0) -> None:
        """Wait until all but ``but`` requests have arrived, at most 30 s, so that a failed request does not block the
        others for ever."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._awaited) <= but, _ARRIVE_S)

    def answered(self, part: str) -> None:
        """Note that a request was answered or failed; either way, the others no longer wait for it."""
        self.arrived(part)
        self._answers[part].set()

    def wait_for_answers(self, parts: Collection[str]) -> None:
        """Wait until those of these requests that belong to the stage are answered."""
        for part in parts:
            if part in self._answers:
                self._answers[part].wait()
