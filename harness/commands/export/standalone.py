"""Start vLLM engines, send them one case and compare their answers with the right ones.

Needs Linux, vLLM, NIXL where there are a prefill and a decode engine, and the standard library:

    python THIS_FILE                      # the Python that vLLM is installed in
    python THIS_FILE --python /other/env/bin/python --keep-logs logs

Exit code 1 when the defect is there, 0 when enough tries gave right answers (--tries) to exclude the rate at which it
was seen, 2 when there were too few or the case could not be tried. Nothing is fetched. Engines listen on loopback
only, answer to a random key alone, and end with this program, whatever ends it. The engines' commands come first,
then the program, then the requests with their right answers, then the models.
Written by kv-acceptance-harness.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import functools
import hashlib
import http.client
import json
import math
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from string import Template
from typing import Any

# The engines, and how answers are judged. The requests are in STAGES, below.
CASE: dict[str, Any] = {}

HOST = "127.0.0.1"
KEY = secrets.token_urlsafe(32)
"""What the engines answer to: of this try, in their environment and nowhere else."""
HOLD_S = 0.25
"""How long an engine is held after requests were sent, so that all of them are queued."""
SETTLE_S = 1.0
"""How long the decode engine has for counting its last transfer."""
say = functools.partial(print, flush=True)


class CannotTell(Exception):
    """The case could not be tried; the message says why."""


def attempt(options: argparse.Namespace, scratch: Path) -> int:
    """Try the case until the defect shows, at most ``--tries`` times; returns the exit code."""
    say(CASE["title"])
    say(f"recorded with vllm {CASE['versions'].get('vllm')}, {CASE['cell']}, {CASE['scenario']}")
    begun = time.monotonic()
    models = unpacked(scratch, options.model)
    (scratch / "guard").mkdir()
    (scratch / "guard" / f"{CASE['guard']}.py").write_text(GUARD)
    engines = {spec["role"]: Engine(spec, options, models, scratch) for spec in CASE["engines"]}
    if not wait_until(lambda: all(e.ready() for e in engines.values()), options.limit):
        raise CannotTell(f"expected the engines to be ready within {options.limit:.0f} s, found them still starting")
    for engine in engines.values():
        engine.require_guarded()
    warm_up(engines)
    say(f"{len(engines)} engines ready after {time.monotonic() - begun:.0f} s")

    for number in range(1, options.tries + 1):
        if number > 1:
            say(f"try {number} of {options.tries}")
            scrub(engines)
        Engine.salt = f"{number} "
        if problems := wrong(engines):
            for line in problems:
                say(line)
            say("THE DEFECT IS THERE")
            return 1
    needed, seen = CASE["tries"], CASE["seen"]
    if options.tries < needed:
        above = 100 * (1 - 0.05 ** (1 / options.tries))
        raise CannotTell(
            f"expected {needed} quiet tries to exclude {seen} with 95 % confidence, found {options.tries}, which "
            f"exclude a rate above {above:.3g} %: use --tries {needed}"
        )
    say(f"the defect is not there: answers are as expected (quiet tries: {options.tries}; seen at {seen})")
    if CASE["injected"]:
        say(f"that says nothing: {CASE['injected']}")
    return 0


def wrong(engines: dict[str, Engine]) -> list[str]:
    """Try the case once; returns what is wrong."""
    moved = -engines["decode"].bytes_moved() if "prefill" in engines else 0.0
    problems = []
    for stage in STAGES:
        answers = play(stage, engines)
        for send in stage["sends"]:
            problems += compare(send, answers[send["part"]]) if "right" in send else []
    if "prefill" in engines:
        time.sleep(SETTLE_S)
        moved += engines["decode"].bytes_moved()
        say(f"KV moved from P to D: {moved:,.0f} bytes")
        if not moved and not problems:
            raise CannotTell("right answers, but no KV moved: nothing was tested")
    return problems


# --- requests --------------------------------------------------------------------------------------------------------


def play(stage: dict[str, Any], engines: dict[str, Engine]) -> dict[str, Any]:
    """Send the requests of a stage at the same time; returns their answers by part.

    ``hold`` pauses an engine until all requests are queued there, so that it begins them in one step: the one that
    is asked ``first`` (P in a pair), or the one that is ``answering`` (D in a pair).
    """
    sends = stage["sends"]
    answered = {send["part"]: threading.Event() for send in sends}
    held = engines["prefill"] if stage.get("hold") == "first" and "prefill" in engines else answering(engines)
    queued = len(held.asked) + sum("after" not in send for send in sends)

    def sent(send: dict[str, Any]) -> dict[str, Any]:
        try:
            for part in send.get("after", ()):
                answered[part].wait()
            time.sleep(send.get("after_s", 0.0))
            if send.get("last"):
                wait_until(lambda: len(held.asked) >= queued - 1, 60)
                time.sleep(HOLD_S)
            return answer(send, engines)
        finally:
            answered[send["part"]].set()

    if stage.get("hold"):
        held.ask("POST", "/pause?mode=keep&clear_cache=false")
    futures = started([functools.partial(sent, send) for send in sends])
    if stage.get("hold"):
        wait_until(lambda: len(held.asked) >= queued, 60)
        time.sleep(HOLD_S)
        held.ask("POST", "/resume")
    return {send["part"]: future.result() for send, future in zip(sends, futures, strict=True)}


def answer(send: dict[str, Any], engines: dict[str, Engine]) -> dict[str, Any]:
    """Ask P and then D with what P says of its blocks, or one engine alone."""
    if send.get("route") == "prefill":
        return engines["prefill"].complete(send)
    last, parameters, first = answering(engines), {}, {}
    if "prefill" in engines and send.get("route") != "local":
        kept = last.kept if send.get("read_back") else CASE["keep_blocks"]
        first = engines["prefill"].complete(send, max_tokens=1, kv_transfer_params=kept) if kept else {}
        parameters = {"kv_transfer_params": first.get("kv_transfer_params")}
        if not parameters["kv_transfer_params"]:
            words = "kv_transfer_params in the prefill engine's answer" if kept else "D to say where P finds its blocks"
            raise CannotTell(f"expected {words}, found none")
    for other in send.get("between", ()):
        answer(other, engines)
    found = last.complete(send, **parameters)
    last.kept = found.get("kv_transfer_params")
    return {**found, "prefill": first}


def answering(engines: dict[str, Engine]) -> Engine:
    return engines.get("decode") or engines["single"]


def warm_up(engines: dict[str, Engine]) -> None:
    """Compile kernels, and in a pair do one hand-off: the first NIXL handshake may time out."""
    send = {"group": "warm-up", "prompt": list(range(1, CASE["block_size"] + 2)), "max_tokens": 8}
    for future in started([functools.partial(engine.complete, send) for engine in engines.values()]):
        future.result()
    for engine in engines.values():
        engine.gather_threads()
    for number in range(5 if "prefill" in engines else 0):
        try:
            answer({**send, "group": f"warm-up {number}"}, engines)
            return
        except CannotTell:
            if number == 4:
                raise
            time.sleep(2)


def scrub(engines: dict[str, Engine]) -> None:
    """Overwrite the free KV blocks: right contents that a try left there would hide the defect from the next. A large
    pool reuses them late."""
    for engine in engines.values():
        told = re.search(r'num_gpu_blocks="(\d+)"', engine.ask("GET", "/metrics"))
        left, each = int(told[1]) if told else 0, CASE["context"] // CASE["block_size"] - 1
        for start in range(0, left if left < 256 else 0, each):
            fill = [1] * each * CASE["block_size"]
            engine.complete({"group": f"fill from {start}", "prompt": fill, "max_tokens": 1})


def started(calls: list[Callable[[], Any]]) -> list[Future[Any]]:
    """Start all calls, each in its own thread; an interrupted program does not wait for them."""
    pool = ThreadPoolExecutor(len(calls))
    return [pool.submit(call) for call in calls]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for the condition, at most ``seconds``; return whether it holds."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


# --- judging ---------------------------------------------------------------------------------------------------------


def compare(send: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what is wrong with an answer, in words; empty if it is right."""
    part, expected, choice = send["part"], send["right"]["tokens"], found["choices"][0]
    tokens, problems = choice["token_ids"], []
    if choice.get("prompt_token_ids") not in (None, send["prompt"]):
        problems.append(f"{part}: the engine saw other prompt tokens than were sent")
    say(f"{part}: prompt of {len(send['prompt'])} tokens, {CASE['block_size']} in a block")
    say(f"  expected {' '.join(map(str, expected))}")
    say(f"  observed {' '.join(map(str, tokens))}")
    for own in (found.get("prefill") or {}).get("choices", ()):
        if own["token_ids"][:1] != expected[:1] and gap(own, 0) > CASE["near_tie_nats"]:
            problems.append(f"{part}: the prefill engine's own token is {own['token_ids'][0]}, not {expected[0]}")
        elif own["token_ids"][:1] == tokens[:1] and CASE["logprob_nats"] < abs(gap(own, 0) - gap(choice, 0)) < math.inf:
            apart = f"{abs(gap(own, 0) - gap(choice, 0)):.3g} nats apart"
            problems.append(f"{part}: P and D, which computes the first token anew from P's KV, are {apart} on it")
    if tokens == expected:
        return problems + other_steps(part, found, send["right"].get("accepted"), len(tokens))
    same = [a == b for a, b in zip(tokens, expected, strict=False)]
    at = same.index(False) if False in same else len(same)
    if gap(choice, at) <= CASE["near_tie_nats"]:
        apart = f"{gap(choice, at):.3f} nats apart"
        say(f"  first difference at output token {at}, where the two best are {apart}: no defect")
        return problems
    return [*problems, f"{part}: the first wrong token is output {at}"]


def gap(choice: dict[str, Any], at: int) -> float:
    """Nats between the two best tokens at an output position; infinite where they are not told."""
    tables = (choice.get("logprobs") or {}).get("top_logprobs") or []
    best = sorted((tables[at] or {}).values(), reverse=True)[:2] if at < len(tables) else []
    return best[0] - best[1] if len(best) == 2 else float("inf")


def other_steps(part: str, found: dict[str, Any], expected: list[int] | None, tokens: int) -> list[str]:
    """Return what is wrong with the accepted drafts per step; the decode engine's first, padded step does not count."""
    if expected is None:
        return []
    steps = ((found.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted")
    if steps is None:
        say("  accepted drafts: this vLLM does not report them per request")
        return []
    say(f"  accepted drafts per step: expected {expected}, observed {steps}")
    readings = [steps, steps[1:]] if steps and steps[0] == 0 else [steps]
    if slack := CASE["acceptance_slack"]:
        wanted = sum(expected) / max(1, len(expected))
        near = [r for r in readings if r and abs(sum(r) / len(r) - wanted) <= slack * wanted]
        return [] if near else [f"{part}: acceptance differs from the expected one by more than {100 * slack:.0f} %"]
    same = any(same_steps(reading, expected, tokens) for reading in readings)
    return [] if same else [f"{part}: right tokens, different accepted drafts"]


def same_steps(found: list[int], expected: list[int], tokens: int) -> bool:
    """Return whether the same drafts were accepted; the last step may accept past the end of a shorter output."""
    produced = 1
    for ours, theirs in zip(found, expected, strict=False):
        produced += ours + 1
        if ours != theirs and produced < tokens:
            return False
    return found == expected or produced >= tokens


# --- engines ---------------------------------------------------------------------------------------------------------


class Engine:
    """A vLLM server in a session of its own."""

    salt = ""
    """What keeps a try from finding the prompts of another one in the prefix cache."""

    def __init__(self, spec: dict[str, Any], options: argparse.Namespace, models: dict[str, str], scratch: Path):
        """Start it. Raises CannotTell when there is no process for it, and OSError when its log cannot be written."""
        self.role: str = spec["role"]
        self.port = free_port()
        self.asked: list[str] = []
        self.kept: Any = None
        cores, slot = sorted(os.sched_getaffinity(0)), spec["slot"]
        self.core = cores[slot] if slot is not None and slot < len(cores) else None
        words = {
            "python": options.python,
            "port": str(self.port),
            "side_channel": str(free_port()),
            "core": "nobind" if self.core is None else str(self.core),
            "openmp": str(Path(options.python).parent.parent / "lib" / "libiomp5.so"),
            "guard": str(scratch / "guard"),
            **models,
        }
        # Others might change what is tested, or be secrets; --env sets them for one engine.
        names, prefixes = CASE["inherited"]["names"], tuple(CASE["inherited"]["prefixes"])
        env = {k: v for k, v in os.environ.items() if k in names or k.startswith(prefixes)}
        env = {k: v for k, v in env.items() if not k.endswith(("_TOKEN", "_KEY", "_SECRET", "PASSWORD"))}
        env |= {k: Template(v).safe_substitute(words) for k, v in spec["env"].items()} | {"VLLM_API_KEY": KEY}
        if not Path(env.get("LD_PRELOAD", "")).is_file():
            env.pop("LD_PRELOAD", None)
        # vLLM leaves its sockets behind. It appends a UUID, and their names have 107 bytes at most.
        sockets = scratch / f"tmp-{self.role}"
        sockets.mkdir(mode=0o700)
        env |= {"VLLM_RPC_BASE_PATH": str(sockets)} if len(os.fsencode(sockets)) <= 70 else {}
        env |= dict(item.partition(":")[2].split("=", 1) for item in options.env if item.startswith(f"{self.role}:"))
        logs = Path(options.keep_logs or scratch)
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{self.role}.log"
        self._start([Template(a).safe_substitute(words) for a in spec["argv"]], env)

    def _start(self, argv: list[str], env: dict[str, str]) -> None:
        begin = functools.partial(become_engine, os.getpid())
        with self.log.open("wb") as log:
            output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            # Python loses an interrupt that comes while it forks, and nobody would know of the engine.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self.process = subprocess.Popen(argv, env=env, **output, start_new_session=True, preexec_fn=begin)
                RUNNING.append(self.process)
            except OSError as error:
                raise CannotTell(f"expected to start the {self.role} engine, found: {error}") from error
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def ready(self) -> bool:
        """Raise CannotTell when it has ended."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise CannotTell(
                f"expected the {self.role} engine to start, found that it ended with {self.process.returncode}; its "
                f"log ends with:\n{tail}"
            )
        with contextlib.suppress(CannotTell):
            return self.ask("GET", "/health", timeout=5) is not None
        return False

    def require_guarded(self) -> None:
        """Raise CannotTell when it answers requests without the key."""
        try:
            self.ask("GET", "/metrics", key="")
        except CannotTell:
            return
        raise CannotTell(f"expected the {self.role} engine to refuse strangers, found that it answers them")

    def ask(self, method: str, path: str, body: Any = None, key: str = KEY, timeout: float = 120) -> str:
        """The text of an answer with status 200, which no proxy sees. Raises CannotTell when there is none."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers if key else {})
            response = connection.getresponse()
            status, text = response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
            raise CannotTell(f"expected an answer of the {self.role} engine, found {problem}") from error
        finally:
            connection.close()
        if status != 200:
            raise CannotTell(f"expected status 200 of the {self.role} engine, found {status}: {text[:300]}")
        return text

    def complete(self, send: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """A completion with token ids. Raises CannotTell when there is none."""
        body = {
            "model": CASE["model_name"],
            "prompt": send["prompt"],
            "max_tokens": send["max_tokens"],
            "temperature": send.get("temperature", 0.0),
            "seed": 0,
            "add_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "cache_salt": self.salt + send["group"],
            **changes,
        }
        self.asked.append(send["group"])
        text = self.ask("POST", "/v1/completions", body)
        try:
            found: dict[str, Any] = json.loads(text)
            if not all(isinstance(token, int) for token in found["choices"][0]["token_ids"]):
                raise ValueError("token ids that are no integers")
        except (ValueError, LookupError, TypeError) as error:
            raise CannotTell(
                f"expected a completion of the {self.role} engine with token ids, found {type(error).__name__}: "
                f"{error} in {text[:300]!r}"
            ) from error
        return found

    def bytes_moved(self) -> float:
        """Bytes that NIXL brought to this engine so far."""
        lines = self.ask("GET", "/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:nixl_bytes_transferred_sum"))

    def gather_threads(self) -> None:
        """On CPU, keep the threads that run the model on its core: NIXL's polling thread stalls the other engine
        otherwise."""
        named: dict[str, list[int]] = {"Worker": [], "EngineCor": []}
        for pid in living({self.process.pid}) if self.core is not None else ():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text()
                for kind in named:
                    if kind in name:
                        named[kind].append(pid)
        for pid in named["Worker"] or named["EngineCor"]:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), {self.core or 0})


def free_port() -> int:
    """Below the range from which the kernel takes ports for outgoing connections."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, random.SystemRandom().randrange(20000, 32000)))
            port: int = probe.getsockname()[1]
            return port


def unpacked(folder: Path, given: list[str]) -> dict[str, str]:
    """Return the folder of each model: unpacked from this file, or as given."""
    models = dict(item.split("=", 1) for item in given)
    for name, wanted in CASE["models"].items():
        if name not in models and not wanted.get("files"):
            raise CannotTell(f"expected --model {name}=PATH: {wanted['name']} is not part of this file")
        for file, digest in wanted.get("files", {}).items() if name not in models else ():
            data = b""
            with contextlib.suppress(KeyError, ValueError, zlib.error):
                data = zlib.decompress(base64.b85decode("".join(FILES[digest].split())))
            if hashlib.sha256(data).hexdigest() != digest:
                raise CannotTell(
                    f"expected {file} of {name} with SHA-256 {digest}, found another: this file is damaged"
                )
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_bytes(data)
        models.setdefault(name, str(folder / name))
    return models


# --- the end of engines ----------------------------------------------------------------------------------------------

RUNNING: list[subprocess.Popen[bytes]] = []
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_engines() -> None:
    """End all engines and their children, and remove what they left in shared memory, with signals blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    sessions = {process.pid for process in RUNNING}
    pids = living(sessions)
    for process in RUNNING:
        process.terminate()
    wait_until(lambda: all(process.poll() is not None for process in RUNNING), 15)
    wait_until(lambda: not living(sessions), 2)
    pids += living(sessions)
    # Python's resource trackers remove semaphores and segments (160 MB and more each) of processes that were killed.
    wait_until(lambda: not killed([pid for pid in living(sessions) if not tracks_resources(pid)]), 10)
    wait_until(lambda: not living(sessions), 3)
    if not wait_until(lambda: not killed(living(sessions)), 10):
        say(f"cannot be killed: processes {', '.join(map(str, living(sessions)))} of the engines")
    # OpenMP and torch call theirs after the process.
    for pid in pids:
        for left in (f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}", f"torch_{pid}_*"):
            for path in Path("/dev/shm").glob(left):
                with contextlib.suppress(OSError):
                    path.unlink()


def living(sessions: set[int]) -> list[int]:
    """Return the living processes of these sessions."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) in sessions and state not in "ZX":
                found.append(int(entry.name))
    return found


def killed(pids: list[int]) -> list[int]:
    """The same processes, after SIGKILL was sent to each."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return pids


def tracks_resources(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end_with(parent: int) -> None:
    """Have this process, which ``parent`` just started, get TERM when ``parent`` ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(2)


def become_engine(parent: int) -> None:
    """What a process does before it becomes an engine."""
    end_with(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


# --- this program ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Try the case in a process of its own, which ends the engines also when this one is killed."""
    options, this = parsed(), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        worker = os.fork()
    except OSError as error:
        return cannot_tell(f"expected to start a process that tries the case, found: {error}")
    if worker == 0:
        tried(options, this)

    def pass_on(*_: object) -> None:
        with contextlib.suppress(OSError):
            os.kill(worker, signal.SIGTERM)

    for number in SIGNALS:
        # Whoever starts this with nohup means that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    return code if code >= 0 else cannot_tell(f"the process that tried the case was ended by signal {-code}")


def tried(options: argparse.Namespace, parent: int) -> None:
    """Try the case and end this process with the exit code. Whatever keeps it from being tried is 2: Python would end
    with 1, which says that the defect is there."""
    code = 2
    try:
        os.setsid()
        end_with(parent)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with tempfile.TemporaryDirectory(prefix=f"repro-{os.getuid()}-", ignore_cleanup_errors=True) as scratch:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                code = attempt(options, Path(scratch))
            finally:
                end_engines()
    except KeyboardInterrupt:
        code = cannot_tell("interrupted")
    except (CannotTell, OSError) as error:
        code = cannot_tell(str(error))
    except Exception as error:
        code = cannot_tell(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def cannot_tell(why: str) -> int:
    """Say so, wherever that can still be written."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            say(f"cannot tell: {why}".replace(KEY, "<redacted>"), file=stream)
            break
    return 2


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=CASE.get("title"), epilog="Exit code 1: the defect is there; 0: not; 2: unknown."
    )
    parser.add_argument("--python", default=sys.executable, help="the Python that vLLM is installed in")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=PATH", help="use this model instead")
    parser.add_argument(
        "--env", action="append", default=[], metavar="ROLE:NAME=VALUE", help="set a variable for one engine"
    )
    parser.add_argument(
        "--tries",
        type=int,
        default=min(CASE["tries"], 60),
        metavar="N",
        help=f"most tries; {CASE['tries']} quiet ones exclude {CASE['seen'].replace('%', '%%')}, and fewer end with 2",
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds for the engines to start")
    parser.add_argument("--keep-logs", metavar="FOLDER", help="keep the engines' logs there")
    options = parser.parse_args()
    if options.tries < 1:
        parser.error(f"--tries: expected at least 1, found {options.tries}")
    roles = {e["role"] for e in CASE["engines"]}
    for item in options.env:
        role, _, rest = item.partition(":")
        if role not in roles or "=" not in rest:
            parser.error(f"--env {item!r}: expected ROLE:NAME=VALUE with a role of {', '.join(sorted(roles))}")
    for item in options.model:
        if item.partition("=")[0] not in CASE["models"] or "=" not in item:
            parser.error(f"--model {item!r}: expected NAME=PATH with a name of {', '.join(CASE['models'])}")
    return options


# --- data ------------------------------------------------------------------------------------------------------------

# Requests of one stage are sent together; those with a right answer are judged.
STAGES: list[dict[str, Any]] = []

# Middleware of the engines: no path but /health answers without the key.
GUARD: str = ""

# The models' files by SHA-256, compressed, as Base85.
FILES: dict[str, str] = {}


if __name__ == "__main__":
    sys.exit(main())
