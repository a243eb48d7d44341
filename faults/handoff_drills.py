"""Drills on the hand-off and the link between P and D, on a pair that keeps running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from faults import response_faults as a
from faults.metrics import WAITING, above_zero
from faults.proxy import Answer, Call, Fault, FaultError, Request
from faults.request_drill import EITHER, LEASE_S, ExchangeDrill, Make, R, on_answers
from faults.tcp_relay import REFUSED_PORT, Relay, led_to
from faults.testbed import Scene
from harness.engines.request import new_id
from harness.profiles.cells import Role

_BROKEN = "the exchange broke: .*decode engine"
_RECOVERED = "no failed NIXL transfer"
"""After a failed handshake D computes the prompt by itself (``kv_load_failure_policy: recompute``) and answers rightly:
only its counters tell that no KV moved."""
_HANDSHAKE_S = 6.0
"""Delay that fails the handshake: vLLM waits 5 s for each message of P's side channel (zmq)."""
_QUEUE_S = 20.0


def _other_blocks(change: Callable[[list[int]], list[int]]) -> Fault:
    """Return a fault by which P hands over other blocks, changed group by group."""

    def edit(body: dict[str, Any]) -> None:
        params = body["kv_transfer_params"]
        params["remote_block_ids"] = [change(group) for group in params["remote_block_ids"]]

    return a.edited(edit)


def _relayed(delay_s: float | None) -> Make:
    """Return what leads D to P's side channel through a slow relay, or without a delay, to a silent one."""

    def make(scene: Scene) -> Fault:
        target = None if delay_s is None else scene.side_channels["prefill"]
        relay = scene.resources.enter_context(Relay(target, delay_s or 0.0))
        scene.require(lambda: relay.failed)
        return led_to(relay.port)

    return make


def delayed(seconds: float) -> Fault:
    """Return a fault that delays the request to the engine."""

    def fault(call: Call) -> Answer:
        if call.wait(seconds):
            raise FaultError(f"expected the run to last {seconds:g} s after the strike, found it over")
        return call.forward()

    return fault


def _engine(role: Role) -> Make:
    """Return what sends the request to another engine of the pair."""
    return lambda scene: a.elsewhere(lambda: scene.engines[role].url)


def exhaust_pool(count: int) -> Fault:
    """Return a fault that first prefills ``count`` other prompts on P whose KV D never pulls.

    A pool of 28 blocks holds four of them, each until its lease ends, so the struck request waits for several leases.
    """

    def fault(call: Call) -> Answer:
        troubles: list[str] = []
        for number in range(count):
            body = {**call.request.json, "prompt": [*range(10, 190)], "cache_salt": new_id(), "seed": number}
            headers = tuple((k, v) for k, v in call.request.headers if k.lower() != "x-request-id")
            other = call.request._replace(headers=(*headers, ("X-Request-Id", new_id()))).with_json(body)
            threading.Thread(target=_ask, args=(call, other, troubles), daemon=True).start()
        metrics = call.request._replace(method="GET", path="/metrics", body=b"")
        deadline = time.monotonic() + _QUEUE_S
        seen = 0
        while seen < 2:
            if call.wait(1.0) or troubles or time.monotonic() > deadline:
                why = "; ".join(troubles) or f"none of them had to wait within {_QUEUE_S:.0f} s"
                raise FaultError(f"expected P to have no room for all of the other prompts, found: {why}")
            # Seen only once, it may be a request that is about to be scheduled.
            text = call.forward(metrics).body.decode(errors="replace")
            seen = seen + 1 if above_zero(text, WAITING) else 0
        call.acted()
        return call.forward()

    return fault


def _ask(call: Call, request: Request, troubles: list[str]) -> None:
    try:
        status = call.forward(request).status
    except Exception as error:
        troubles.append(f"{type(error).__name__}: {error}")
    else:
        if status != 200:
            troubles.append(f"status {status}")


_on_p = partial(on_answers, target="P", group="handoff", bound_s=90.0)
_on_d = partial(on_answers, target="D", group="handoff", bound_s=120.0)
_side_channel = partial(_on_p, reason=_RECOVERED, late=True)
_no_blocks = partial(_on_p, reason=f"block ids per KV-cache group|{_BROKEN}|ended by itself", fatal=True)
_PROOF = "proof that KV moved"

HANDOFFS: tuple[ExchangeDrill, ...] = (
    _on_p(
        "no-parameters",
        "P's answer has no KV transfer parameters",
        fault=a.edited(lambda b: b.pop("kv_transfer_params")),
        reason="expected kv_transfer_params",
    ),
    # Block 0 is vLLM's null block.
    _on_p(
        "other-blocks",
        "P hands over other blocks of its pool",
        fault=_other_blocks(lambda group: [b % 24 + 2 for b in group]),
        verdicts=R,
        reason="the baseline has",
    ),
    _on_d(
        "lost-parameters",
        "D gets the request without P's parameters",
        fault=a.altered_request(lambda b: b.pop("kv_transfer_params")),
        reason=_PROOF,
    ),
    _side_channel("side-refused", "P's side channel refuses connections", fault=led_to(REFUSED_PORT)),
    _side_channel("side-silent", "P's side channel accepts connections and stays silent", make=_relayed(None)),
    _side_channel(
        "side-slow",
        f"a link that delays P's side channel by {_HANDSHAKE_S:.0f} s each way",
        make=_relayed(_HANDSHAKE_S),
    ),
    _side_channel(
        "other-engine-id",
        "P's parameters name another engine",
        make=lambda scene: led_to(scene.side_channels["prefill"]),
    ),
    _on_d(
        "late",
        "D gets the request after P's lease has ended, every time",
        fault=delayed(LEASE_S + 2),
        verdicts=EITHER,
        reason="P's lease|leases that expired",
    ),
    _on_d(
        "p-for-d",
        "a prefill engine behind D's port",
        make=_engine("prefill"),
        verdicts=EITHER,
        reason=f"{_PROOF}|the exchange broke|in its prefix cache",
        struck="all",
    ),
    _on_p(
        "d-for-p",
        "a decode engine behind P's port",
        make=_engine("decode"),
        verdicts=EITHER,
        reason=f"{_PROOF}|the exchange broke",
        struck="all",
    ),
    on_answers(
        "pool-exhausted",
        "P's KV pool is full of hand-offs that no D completes",
        "P",
        exhaust_pool(18),
        # The blocks of those hand-offs, which the harness knows nothing of, may still be held when it asks for them.
        EITHER,
        "ReadTimeout|within .* s",
        struck="last",
        group="resource",
        bound_s=120.0,
    ),
    # These come last, because D of vLLM 0.32.0 dies of block lists that are too short.
    _on_p(
        "fewer-blocks",
        "P hands over one block too few",
        fault=_other_blocks(lambda group: group[:-1]),
        verdicts=EITHER,
        reason=f"blocks in KV-cache group|{_BROKEN}|ended by itself",
        fatal=True,
    ),
    _no_blocks(
        "no-groups",
        "P hands over no block lists",
        fault=a.edited(lambda b: b["kv_transfer_params"].update(remote_block_ids=[])),
    ),
    _no_blocks("empty-blocks", "P hands over empty block lists", fault=_other_blocks(lambda _: [])),
    _on_p(
        "blocks-beyond",
        "P hands over ids of blocks that no pool has",
        fault=_other_blocks(lambda group: [9999] * len(group)),
        verdicts=EITHER,
        reason=f"{_BROKEN}|ended by itself|the baseline has|published a block",
        fatal=True,
    ),
)
