"""$title
$reported
    python $file      # of the environment that has vLLM, and NIXL where there are two servers

starts the servers below, sends them the requests, and compares the answers with the right ones. Exit code 1: the defect
shows; 0: it does not; 2: that cannot be told, and why. Nothing is fetched; servers listen on loopback and end with it.
To start one by hand, export the variables and copy its command. Seen with vLLM $vllm.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from typing import Any

VARIABLES = ""

SERVERS: dict[str, str] = {}

# [inline]
STAGES: list[dict[str, Any]] = []

# [end]
CASE: dict[str, Any] = {"tries": 1}

LIMIT_S, TRIES, SETTLE_S = 300, min(CASE["tries"], 60), 1.0
KEY, HERE, LIBC = os.urandom(16).hex(), pathlib.Path(__file__).resolve().parent, ctypes.CDLL(None)
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PORTS = {role: int(command.partition("--port ")[2].split()[0]) for role, command in SERVERS.items()}
RUNNING: dict[str, subprocess.Popen[bytes]] = {}
# [pair]
KEEP = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
KEEP |= {"remote_host": None, "remote_port": None}
MOVED = re.compile(r"^vllm:nixl_bytes_transferred_sum.* (\S+)$", re.MULTILINE)
# [routes]
LAST: dict[str, Any] = {}
# [end]
say = functools.partial(print, sep="\n", flush=True)


def compare(send: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what is wrong with an answer; empty if it is right."""
    part, expected, choice = send["part"], send["right"]["tokens"], found["choices"][0]
    tokens, problems = [int(token) for token in choice["token_ids"]], []
    say(f"{part}: {len(send['prompt'])} prompt tokens", f"  expected {expected}", f"  found    {tokens}")
    if choice.get("prompt_token_ids") not in (None, send["prompt"]):
        problems.append(f"{part}: the server saw other prompt tokens than were sent")
    # [pair whole]
    for own in found["prefill"].get("choices", ()):
        # [pair whole plain]
        if own["token_ids"][:1] != expected[:1]:
            problems.append(f"{part}: the prefill server's own token is {own['token_ids'][:1]}, not {expected[:1]}")
        # [pair whole gaps]
        apart = abs(gap(own, 0) - gap(choice, 0))
        if own["token_ids"][:1] != expected[:1] and gap(own, 0) > CASE["near_tie_nats"]:
            problems.append(f"{part}: the prefill server's own token is {own['token_ids'][:1]}, not {expected[:1]}")
        elif own["token_ids"][:1] == tokens[:1] and CASE["logprob_nats"] < apart < float("inf"):
            problems.append(f"{part}: P and D, which computes the first token anew, are {apart:.3g} nats apart on it")
    # [end]
    if tokens != expected:
        at = next((n for n, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(tokens))
        # [plain]
        problems.append(f"{part}: the first wrong token is output {at}")
        # [gaps]
        if gap(choice, at) > CASE["near_tie_nats"]:
            return [*problems, f"{part}: the first wrong token is output {at}"]
        say(f"  no defect: the best two tokens of output {at} are {gap(choice, at):.3f} nats apart")
    # [drafts]
    steps = ((found.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted")
    if tokens == expected and steps is not None and (accepted := send["right"].get("accepted")) is not None:
        say(f"  accepted drafts per step: expected {accepted}", f"                            found    {steps}")
        readings = [steps, steps[1:]] if steps[:1] == [0] else [steps]
        # [drafts exact]
        # D's first step after a hand-off may have no drafts, and the last accept some past the end of the answer.
        if not any(len(told) == len(accepted) and told[:-1] == accepted[:-1] for told in readings):
            problems.append(f"{part}: right tokens, different accepted drafts")
        # [drafts slack]
        wanted = sum(accepted) / max(1, len(accepted))
        if not any(abs(sum(told) / max(1, len(told)) - wanted) <= CASE["slack"] * wanted for told in readings):
            problems.append(f"{part}: acceptance differs by more than {CASE['slack']:.0%} from the expected one")
    # [end]
    return problems


# [gaps]
def gap(choice: dict[str, Any], at: int) -> float:
    """Return the nats between the two best tokens at an output position; infinite where they are not told."""
    tables = (choice.get("logprobs") or {}).get("top_logprobs") or []
    best = sorted((tables[at] or {}).values(), reverse=True)[:2] if at < len(tables) else []
    return best[0] - best[1] if len(best) == 2 else float("inf")


# [end]
def ask(role: str, path: str, body: str = "", timeout: float = 120) -> str:
    """Return the text of an answer, which no proxy sees; a body is posted. Raises RuntimeError when there is none."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{PORTS[role]}{path}", body.encode() or None, headers)
        return str(OPENER.open(request, timeout=timeout).read(), errors="replace")
    except Exception as error:
        said = getattr(error, "read", bytes)()[:300].decode(errors="replace")
        raise RuntimeError(f"expected an answer of the {role} server to {path}, found {error!r} {said}") from error


def complete(role: str, send: dict[str, Any], salt: str, **more: Any) -> dict[str, Any]:
    """Return a completion. With ``salt``, no prompt of another try is in the prefix cache."""
    body = {"temperature": 0} | {k: send[k] for k in ("prompt", "max_tokens", "temperature") if k in send} | more
    body |= {"model": CASE["model"], "seed": 0, "add_special_tokens": False, "cache_salt": salt + send["group"]}
    body |= {"return_token_ids": True, "logprobs": 2, "return_tokens_as_token_ids": True}
    return dict(json.loads(ask(role, "/v1/completions", json.dumps(body))))


def answer(send: dict[str, Any], salt: str) -> dict[str, Any]:
    """Ask the server; in a pair P, and then D with what P says of its blocks."""
    # [single]
    return complete("single", send, salt)
    # [routes]
    if send.get("route"):
        if send["route"] == "read-back":
            return complete("prefill", send, salt, kv_transfer_params=LAST) | {"prefill": {}}
        return complete("prefill" if send["route"] == "prefill" else "decode", send, salt) | {"prefill": {}}
    keep = LAST if send.get("read_back") else KEEP
    first = complete("prefill", send, salt, max_tokens=1, kv_transfer_params=keep)
    # [direct]
    first = complete("prefill", send, salt, max_tokens=1, kv_transfer_params=KEEP)
    # [pair]
    if not first.get("kv_transfer_params"):
        raise RuntimeError("expected kv_transfer_params in the prefill server's answer, found none")
    # [routes]
    for other in send.get("between", ()):
        answer(other, salt)
    found = complete("decode", send, salt, kv_transfer_params=first["kv_transfer_params"])
    LAST.update(found.get("kv_transfer_params") or {})
    return found | {"prefill": first}
    # [direct]
    return complete("decode", send, salt, kv_transfer_params=first["kv_transfer_params"]) | {"prefill": first}


# [together]
def play(stage: dict[str, Any], salt: str) -> list[dict[str, Any]]:
    """Send requests together. With ``hold``, the server asked "first" or "answering" begins when it has all of them."""
    answered = {send["part"]: threading.Event() for send in stage["sends"]}
    held = list(SERVERS)[0 if stage.get("hold") == "first" else -1]

    def sent(send: dict[str, Any]) -> dict[str, Any]:
        try:
            for part in send.get("after", ()):
                answered[part].wait()
            time.sleep(send.get("after_s", 0.0))
            return answer(send, salt)
        finally:
            answered[send["part"]].set()

    if stage.get("hold"):
        ask(held, "/pause?mode=keep&clear_cache=false", "{}")
    pool = concurrent.futures.ThreadPoolExecutor(len(stage["sends"]))
    futures = [pool.submit(sent, send) for send in stage["sends"]]
    if stage.get("hold"):
        time.sleep(3)
        ask(held, "/resume", "{}")
    return [future.result() for future in futures]


# [tries]
def overwrite(salt: str) -> None:
    """Overwrite the free KV blocks, whose right contents would hide the defect; a large pool reuses them late."""
    size, each = CASE["block_size"], CASE["context"] // CASE["block_size"] - 1
    for role in SERVERS:
        told = re.search(r'num_gpu_blocks="(\d+)"', ask(role, "/metrics"))
        for at in range(0, int(told[1]) if told and int(told[1]) < 256 else 0, each):
            complete(role, {"group": f"block {at}", "prompt": [1] * each * size, "max_tokens": 1}, salt)


# [end]
def start(role: str) -> None:
    """Start a server in a session of its own. Raises RuntimeError when its port is taken."""
    if not socket.socket().connect_ex(("127.0.0.1", PORTS[role])):
        raise RuntimeError(f"expected port {PORTS[role]} to be free, found it taken: change it in the command")
    env = os.environ | {"VIRTUAL_ENV": str(pathlib.Path(sys.executable).parent.parent), "VLLM_API_KEY": KEY}
    text = f'export PATH="$VIRTUAL_ENV/bin:$PATH"{VARIABLES}\nexec >{role}.log 2>&1 </dev/null env \\{SERVERS[role]}'
    if not list(importlib.metadata.distributions(name="vllm")):  # As of CPU builds, with which `vllm serve` ends.
        text = text.replace("vllm serve", f"'{sys.executable}' -m vllm.entrypoints.openai.api_server --model")
    words, ends = ["sh", "-c", text], lambda: LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: ends with this program
    RUNNING[role] = subprocess.Popen(words, env=env, cwd=HERE, start_new_session=True, preexec_fn=ends)


def wait_for(role: str) -> str:
    """Return what a server first answers. Raises RuntimeError when it ends, or does not within LIMIT_S."""
    begun = time.monotonic()
    while (code := RUNNING[role].poll()) is None and time.monotonic() < begun + LIMIT_S:
        with contextlib.suppress(RuntimeError):
            return ask(role, "/health", timeout=5)
        time.sleep(0.2)
    tail = "\n".join((HERE / f"{role}.log").read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"expected a {role} server that answers, found none (exit code {code}):\n{tail}")


def attempt() -> int:
    """Try the case until the defect shows; return the exit code."""
    if sys.argv[1:]:
        raise RuntimeError(f"{sys.argv[0]} takes no arguments, found {' '.join(sys.argv[1:])}; see its first lines")
    # [archive]
    if hashlib.sha256((HERE / CASE["archive"]).read_bytes()).hexdigest() != CASE["sha256"]:
        raise RuntimeError(f"expected {CASE['archive']} with SHA-256 {CASE['sha256']}, found another: it is damaged")
    zipfile.ZipFile(HERE / CASE["archive"]).extractall(HERE)
    # [listed]
    STAGES = json.loads((HERE / CASE["requests"]).read_text())
    # [folders]
    for folder, name in CASE["models"].items():
        if not (HERE / folder).is_dir():
            raise RuntimeError(f"expected the model {name} in the folder {folder} beside this file, found none")
    # [end]
    for begin, role in itertools.product((start, wait_for), SERVERS):
        begin(role)
    # [pair]
    for number in range(5):
        with contextlib.suppress(RuntimeError):  # The first NIXL handshake may time out.
            answer({"group": f"{number}", "prompt": [1] * (CASE["block_size"] + 1), "max_tokens": 8}, "warm-up ")
            break
        time.sleep(2)
    # [end]
    for number in range(1, TRIES + 1):
        # [tries]
        if number > 1:
            say(f"try {number} of {TRIES}")
            overwrite(f"before {number} ")
        # [end]
        # [single]
        problems = list[str]()
        # [pair]
        problems, moved = list[str](), -sum(map(float, MOVED.findall(ask("decode", "/metrics"))))
        # [alone]
        for send in [send for stage in STAGES for send in stage["sends"]]:
            found = answer(send, f"{number} ")
            problems += compare(send, found) if "right" in send else []
        # [together]
        for stage in STAGES:
            for send, found in zip(stage["sends"], play(stage, f"{number} "), strict=True):
                problems += compare(send, found) if "right" in send else []
        # [end]
        if problems:
            say(*problems, "THE DEFECT SHOWS")
            return 1
        # [pair]
        time.sleep(SETTLE_S)
        moved += sum(map(float, MOVED.findall(ask("decode", "/metrics"))))
        say(f"KV moved from P to D: {moved:,.0f} bytes")
        if not moved:
            raise RuntimeError("right answers, but no KV moved: nothing was tested")
        # [end]
    # [tries]
    if CASE["tries"] > TRIES:
        raise RuntimeError(f"{TRIES} tries without it do not exclude {CASE['seen']}: set TRIES to {CASE['tries']}")
    # [end]
    say(f"the defect does not show (tries: {TRIES}; seen at {CASE['seen']})")
    return 0


def main() -> int:
    """Return the exit code. Whatever keeps the case from being tried is 2: Python would end with 1, the defect's."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        return attempt()
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            say(f"cannot tell: {error if isinstance(error, RuntimeError) else f'{type(error).__name__}: {error}'}")
        return 2
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for process in RUNNING.values():
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    os._exit(main())  # At once: threads may still wait for answers.
