"""Moves a few bytes from one process to another by NIXL: a program for the engines' Python, which has NIXL and torch.

    python ask_nixl.py cuda UCX

It prints one line of JSON: ``moved``, or what ``failed`` at which ``stage``; ``untried`` where this NIXL has other
calls than those that are known here, of which nothing follows.
"""

from __future__ import annotations

import base64
import importlib
import json
import subprocess
import sys
import time
from typing import Any

BYTES = 1 << 16
_WAIT_S = 30.0
_OTHER_CALLS = 3
"""Exit code of the process that offers memory."""
_MARK = "harness-nixl "
"""Before lines for the other process, since libraries print what they like."""


def _agent(name: str, backends: list[str]) -> Any:
    api = importlib.import_module("nixl._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=backends))


def _memory(device: str, value: int) -> Any:
    torch = importlib.import_module("torch")
    return torch.full((BYTES,), value, dtype=torch.uint8, device=device)


def _give(device: str, backends: list[str]) -> None:
    """Offer memory until nobody listens any more."""
    try:
        agent, memory = _agent("giver", backends), _memory(device, 7)
        registered = agent.register_memory([memory])
        offered = (agent.get_agent_metadata(), agent.get_serialized_descs(agent.get_xfer_descs([memory])))
    except (AttributeError, TypeError):
        sys.exit(_OTHER_CALLS)
    for part in offered:
        print(_MARK + base64.b64encode(part).decode(), flush=True)
    sys.stdin.read()
    agent.deregister_memory(registered)


def _take(device: str, backends: list[str], giver: subprocess.Popen[str]) -> dict[str, Any]:
    stage = "agent"
    try:
        agent = _agent("taker", backends)
        stage = "memory"
        memory = _memory(device, 0)
        registered = agent.register_memory([memory])
        stage = "transfer"
        offered = [base64.b64decode(line) for line in _lines(giver, 2)]
        peer = agent.add_remote_agent(offered[0])
        theirs = agent.deserialize_descs(offered[1])
        handle = agent.initialize_xfer("READ", agent.get_xfer_descs([memory]), theirs, peer, b"")
        state, until = agent.transfer(handle), time.monotonic() + _WAIT_S
        while state == "PROC" and time.monotonic() < until:
            time.sleep(0.001)
            state = agent.check_xfer_state(handle)
        right = state == "DONE" and bool((memory == 7).all())
        if not right:
            found = f"state {state}" if state != "DONE" else "other bytes than were sent"
            return {"failed": found, "stage": stage}
        agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)
    except (AttributeError, TypeError) as error:
        return {"untried": f"{type(error).__name__}: {error}", "stage": stage}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "stage": stage}
    return {"moved": BYTES}


def _lines(giver: subprocess.Popen[str], count: int) -> list[str]:
    """Read what the other process offers. Raises RuntimeError when it ends before, TypeError when its NIXL has other
    calls."""
    out: list[str] = []
    while len(out) < count:
        line = giver.stdout.readline() if giver.stdout is not None else ""
        if not line:
            if (code := giver.wait()) == _OTHER_CALLS:
                raise TypeError("the calls that offer memory")
            raise RuntimeError(f"the process that offers memory ended with exit code {code}")
        out += [line.removeprefix(_MARK)] if line.startswith(_MARK) else []
    return out


def main(device: str, backends: list[str]) -> None:
    command = [sys.executable, __file__, "give", device, *backends]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as giver:
        answer = _take(device, backends, giver)
        print(json.dumps(answer), flush=True)
        # It waits for this; ``with`` waits for it.
        if giver.stdin is not None:
            giver.stdin.close()


if __name__ == "__main__":
    if sys.argv[1] == "give":
        _give(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1], sys.argv[2:])
