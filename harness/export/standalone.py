"""Starts vLLM engines, sends them one case and compares what they answer with what is right.

Needs vLLM, NIXL where a prefill and a decode engine are involved, and the standard library:

    python THIS_FILE                      # the Python that vLLM is installed in
    python THIS_FILE --python /other/env/bin/python --keep-logs logs

Exit code 1 when the defect is there, 0 when the answers are right, 2 when it cannot be told. Nothing is fetched;
engines listen on loopback only, answer to a random key alone, and are ended with this program, whatever ends it. Their
temporary files go with them. Written by kv-acceptance-harness.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

CASE: dict[str, Any] = {}  # the case

HOST = "127.0.0.1"
KEY = secrets.token_urlsafe(32)
"""What the engines answer to: of this try, in their environment and nowhere else."""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks the engines themselves: the proxy of an environment would get the key and the prompts."""
HOLD_S = 0.25
"""How long an engine is held after requests were sent, so that all of them are queued."""


SHM = Path("/dev/shm")
LIBRARIES = re.compile(
    r"(psm_|sem\.|torch_\d|__KMP_REGISTERED_LIB_\d|pym-|nccl-|cuda\.shm\.|ucx_shm_posix_|vllm_(mm|offload|ec)_).+|.+-cpushm.*"
)
"""How the libraries of engines call the shared memory that they make. Any other may be somebody's data that is only
read."""
TRACKERS_S = 3.0
"""What Python's resource trackers get, after the processes that they work for are gone, to remove what these made."""
ORPHANS_S = 2.0
"""What an engine's other processes get to end by themselves after its server has ended."""

RUNNING: list[Engine] = []
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SOCKETS_IN = 70
"""Bytes of a folder's path in which vLLM's sockets, called after UUIDs, have names that are short enough."""


class CannotTell(Exception):
    """The case could not be tried; the message says why."""


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Raises CannotTell where OSError would be raised."""
    try:
        yield
    except OSError as error:
        raise CannotTell(f"expected to start {what}, found: {error}") from error


# --- what engines leave ----------------------------------------------------------------------------------------------


def own_temporary(folder: Path) -> dict[str, str]:
    """Variables for an engine whose sockets are to lie in ``folder``, which is made: vLLM leaves them behind."""
    if len(os.fsencode(folder)) > SOCKETS_IN:
        print(f"sockets of engines stay in {tempfile.gettempdir()}: the path of {folder} is too long for sockets")
        return {}
    folder.mkdir(mode=0o700)
    return {"VLLM_RPC_BASE_PATH": str(folder)}


def status_of(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the third one on: the state, and the start time as the 20th. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def session_of(leader: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.getsid(int(entry.name)) == leader and status_of(int(entry.name))[0] not in "ZX":
                found.append(int(entry.name))
    return found


def registrations(pids: list[int]) -> dict[Path, int]:
    """Inodes of OpenMP's registrations (1 KiB in ``/dev/shm``) that these living processes made, by path. A process
    that is killed leaves its own. It holds the address of a variable of that very process."""
    found = {}
    for pid in pids:
        path = SHM / f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}"
        with contextlib.suppress(OSError, ValueError):
            known = path.lstat()
            address = re.match(rb"0x([0-9a-f]+)-", path.read_bytes()[:64]) if stat.S_ISREG(known.st_mode) else None
            if address is None or known.st_uid != os.getuid():
                continue
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                span, mode = line.split(maxsplit=2)[:2]
                low, _, high = span.partition("-")
                if "w" in mode and int(low, 16) <= int(address.group(1), 16) < int(high, 16):
                    found[path] = known.st_ino
    return found


def held(pid: int) -> set[int]:
    """Inodes of shared memory that a process has mapped or open. A semaphore is mapped under another name than it has,
    so names say nothing here."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHM}/"):
                found.add(int(fields[4]))
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(handle.readlink()).startswith(f"{SHM}/"):
                    found.add(handle.stat().st_ino)
    return found


def made_by(pids: list[int]) -> dict[Path, int]:
    """Inodes of what these living processes leave in ``/dev/shm`` when they are killed, by path."""
    used = {inode for pid in pids for inode in held(pid)}
    found = registrations(pids)
    with contextlib.suppress(OSError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                known = entry.stat(follow_symlinks=False)
                own = stat.S_ISREG(known.st_mode) and known.st_uid == os.getuid()
                if own and known.st_ino in used and LIBRARIES.fullmatch(entry.name):
                    found[SHM / entry.name] = known.st_ino
    return found


def remove_made(made: dict[Path, int]) -> None:
    """Remove what is still there of this, and what no living process uses."""
    there = {}
    for path, inode in made.items():
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == inode:
                there[path] = inode
    if there:
        used = {inode for entry in Path("/proc").iterdir() if entry.name.isdigit() for inode in held(int(entry.name))}
        for path in (p for p, inode in there.items() if inode not in used):
            with contextlib.suppress(OSError):
                path.unlink()


def tracks_resources(pid: int) -> bool:
    """Whether this is the process of Python's multiprocessing that removes named resources when all that use it are
    gone: vLLM's segments (``psm_*``, 160 MB and more each) and semaphores."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def end_session(leader: int, made: dict[Path, int]) -> list[int]:
    """Kill what lives of a session, its resource trackers last, and remove what its processes made. Returns processes
    that cannot be killed."""
    made = dict(made)
    deadline = time.monotonic() + 10
    while (living := [p for p in session_of(leader) if not tracks_resources(p)]) and time.monotonic() < deadline:
        made |= made_by(living)
        kill(living)
    deadline = time.monotonic() + TRACKERS_S
    while session_of(leader) and time.monotonic() < deadline:
        time.sleep(0.02)
    deadline = time.monotonic() + 10
    while (living := session_of(leader)) and time.monotonic() < deadline:
        kill(living)
    remove_made(made)
    return living


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.02)


class Keeper:
    """A process that waits for the end of this one, SIGKILL included, and then ends the engines that it was told of and
    removes their folder. A vLLM server that loses whoever started it goes on."""

    def __init__(self) -> None:
        """Forks: nothing else may run in this process yet. Raises CannotTell."""
        with starting("the process that ends the engines when this one is killed"):
            self._fork()

    def _fork(self) -> None:
        read, self._write = os.pipe()
        # One that comes before it ignores them would end it alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._pid = os.fork()
            if self._pid == 0:
                try:
                    os.close(self._write)
                    keep(read, before)
                finally:
                    os._exit(0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read)

    def tell(self, kind: str, *what: object) -> None:
        """Raises CannotTell when it is gone."""
        try:
            os.write(self._write, (json.dumps([kind, *what]) + "\n").encode())
        except OSError as error:
            raise CannotTell(
                f"expected the process that ends the engines when this one is killed to live, found: {error}"
            ) from error

    def end(self) -> None:
        """Let it do what is left to do. Nothing interrupts that."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.close(self._write)
        with contextlib.suppress(OSError):
            os.waitpid(self._pid, 0)


def keep(pipe: int, mask: set[int | signal.Signals]) -> None:
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nothing, handle)
    with os.fdopen(pipe, encoding="utf-8") as lines:
        told = [json.loads(line) for line in lines if line.endswith("\n")]
    for kind, *what in told:
        if kind == "engine":
            leader, start = what
            # Somebody else's process may have its pid by now.
            with contextlib.suppress(OSError):
                if status_of(leader)[19] != start:
                    continue
            end_session(leader, {})
    for kind, *what in told:
        if kind == "folder":
            shutil.rmtree(what[0], ignore_errors=True)


# --- engines ---------------------------------------------------------------------------------------------------------


BEGIN = """
import json, os, sys
try:
    argv, env = json.loads(sys.stdin.buffer.read())
except ValueError:
    sys.exit("whoever started this is gone")
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
try:
    os.execvpe(argv[0], argv, env)
except OSError as error:
    sys.exit(f"{argv[0]}: {error.strerror}")
"""
"""Becomes the engine when it has read all of its command, and ends when the pipe is closed before: whatever happens to
this program meanwhile, no engine runs that the keeper was not told of."""


class Engine:
    """A vLLM server in a session of its own."""

    def __init__(
        self,
        spec: dict[str, Any],
        python: str,
        models: dict[str, str],
        extra: dict[str, str],
        logs: Path,
        guard: Path,
        keeper: Keeper,
    ):
        """Raises CannotTell when it cannot be started, and OSError when its log cannot be written."""
        self.role: str = spec["role"]
        self.port, side_channel = free_port(), free_port()
        self.core = core_of(spec.get("slot"))
        prefix = Path(python).parent.parent
        words = {
            "python": python,
            "port": str(self.port),
            "side_channel": str(side_channel),
            "core": str(self.core) if self.core is not None else "nobind",
            "openmp": str(prefix / "lib" / "libiomp5.so"),
            "guard": str(guard),
            **models,
        }
        argv = [filled(a, words) for a in spec["argv"]]
        # Inherited, these would change what is tested; --env sets them for one engine.
        env = {k: v for k, v in os.environ.items() if not k.startswith(tuple(CASE["scrubbed"]))}
        env = {k: v for k, v in env.items() if not k.endswith(("_TOKEN", "_KEY", "_SECRET", "PASSWORD"))}
        env |= {k: filled(v, words) for k, v in spec["env"].items()} | {"VLLM_API_KEY": KEY}
        if not Path(env.get("LD_PRELOAD", "")).is_file():
            env.pop("LD_PRELOAD", None)
        self.log = logs / f"{self.role}.log"
        self.made: dict[Path, int] = {}
        with self.log.open("wb") as stream, starting(f"the {self.role} engine"):
            self._begin(argv, env | extra, stream, keeper)

    def _begin(self, argv: list[str], env: dict[str, str], log: BinaryIO, keeper: Keeper) -> None:
        begin = [sys.executable, "-I", "-S", f"-Xutf8={sys.flags.utf8_mode}", "-c", BEGIN]
        self.process = subprocess.Popen(
            begin, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        RUNNING.append(self)
        keeper.tell("engine", self.process.pid, status_of(self.process.pid)[19])
        assert self.process.stdin is not None
        with self.process.stdin as order:
            order.write(json.dumps([argv, env]).encode())

    def alive(self) -> bool:
        return self.process.poll() is None

    def ready(self) -> bool:
        if not self.alive():
            raise CannotTell(
                f"expected the {self.role} engine to start, found that it ended with {self.process.returncode}; its "
                f"log ends with:\n{self.tail()}"
            )
        with contextlib.suppress(OSError, ValueError):
            status: int = self.ask("/health", timeout=5)[0]
            return status == 200
        return False

    def require_guarded(self) -> None:
        """Raise CannotTell when the engine answers whoever has no key."""
        with contextlib.suppress(urllib.error.HTTPError), OPENER.open(f"{self.url}/metrics", timeout=30) as answer:
            raise CannotTell(f"expected the {self.role} engine to refuse strangers, found status {answer.status}")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def ask(self, path: str, body: dict[str, Any] | None = None, post: bool = False, timeout: float = 120) -> Any:
        """(status, answer as text). Raises CannotTell when what answers speaks no HTTP or no UTF-8, and OSError."""
        data = json.dumps(body).encode() if body is not None else b"" if post else None
        request = urllib.request.Request(f"{self.url}{path}", data=data)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {KEY}")
        try:
            with OPENER.open(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except (http.client.HTTPException, ValueError) as error:
            raise CannotTell(
                f"expected an answer of the {self.role} engine over HTTP, found {type(error).__name__}: {error}"
            ) from error

    def complete(self, send: dict[str, Any], salt: str, **changes: Any) -> dict[str, Any]:
        """The answer's JSON. Raises CannotTell when there is none."""
        body = {
            "model": CASE["model_name"],
            "prompt": send["prompt"],
            "max_tokens": send["max_tokens"],
            "temperature": send["temperature"],
            "seed": 0,
            "add_special_tokens": False,
            "return_token_ids": True,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
            **changes,
        }
        try:
            status, text = self.ask("/v1/completions", body)
        except OSError as error:
            raise CannotTell(f"expected an answer of the {self.role} engine, found {error}") from error
        if status != 200:
            raise CannotTell(f"expected status 200 of the {self.role} engine, found {status}: {text[:300]}")
        return answer_in(text, self.role)

    def bytes_moved(self) -> float:
        """Bytes that NIXL brought to this engine so far."""
        _, text = self.ask("/metrics", timeout=30)
        lines = [line for line in text.splitlines() if line.startswith("vllm:nixl_bytes_transferred_sum")]
        return sum(float(line.split()[-1]) for line in lines)

    def gather_threads(self) -> None:
        """On CPU, keep the worker's threads on its core: NIXL's polling thread stalls the other engine otherwise."""
        for pid in session_of(self.process.pid):
            with contextlib.suppress(OSError):
                if self.core is not None and "Worker" in Path(f"/proc/{pid}/comm").read_text():
                    for task in Path(f"/proc/{pid}/task").iterdir():
                        os.sched_setaffinity(int(task.name), {self.core})

    def tell_to_end(self) -> None:
        """What its processes made is looked at before: those that end at once cannot be asked any more."""
        self.made |= made_by(session_of(self.process.pid))
        if self.alive():
            self.process.terminate()

    def stop(self) -> None:
        self.tell_to_end()
        if self.alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        deadline = time.monotonic() + ORPHANS_S
        while session_of(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left := end_session(self.process.pid, self.made):
            print(f"cannot be killed: processes {', '.join(map(str, left))} of the {self.role} engine")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


def answer_in(text: str, role: str) -> dict[str, Any]:
    """A completion as far as it is looked at. Raises CannotTell when it has another shape."""
    try:
        answer: dict[str, Any] = json.loads(text)
        choice = answer["choices"][0]
        tokens = choice.get("token_ids")
        if tokens is not None and not all(isinstance(t, int) for t in tokens):
            raise ValueError("token ids that are no integers")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CannotTell(
            f"expected a completion of the {role} engine, found {type(error).__name__}: {error} in {text[:300]!r}"
        ) from error
    return answer


def free_port() -> int:
    """Below the range from which the kernel takes ports for outgoing connections."""
    for port in random.SystemRandom().sample(range(20000, 32000), 400):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    raise CannotTell("expected a free port between 20000 and 32000, found none")


def core_of(slot: int | None) -> int | None:
    cores = sorted(os.sched_getaffinity(0))
    return cores[slot] if slot is not None and slot < len(cores) else None


def filled(text: str, words: dict[str, str]) -> str:
    """The text with every ``<<name>>`` replaced."""
    for name, value in words.items():
        text = text.replace(f"<<{name}>>", value)
    return text


def started(
    options: argparse.Namespace, models: dict[str, str], logs: Path, scratch: Path, keeper: Keeper
) -> Iterator[Engine]:
    guard = scratch / "guard"
    guard.mkdir()
    for name, source in CASE["guard"].items():
        (guard / f"{name}.py").write_text(source)
    for spec in CASE["engines"]:
        role = spec["role"]
        extra = dict(item.partition(":")[2].split("=", 1) for item in options.env if item.startswith(f"{role}:"))
        own = own_temporary(scratch / f"tmp-{role}") | extra
        yield Engine(spec, options.python, models, own, logs, guard, keeper)


def wait_ready(engines: list[Engine], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not all(e.ready() for e in engines):
        if time.monotonic() > deadline:
            raise CannotTell(f"expected the engines to be ready within {limit_s:.0f} s, found them still starting")
        time.sleep(0.5)


def warm_up(engines: dict[str, Engine]) -> None:
    """Compile kernels, and for a pair do one hand-off: the first NIXL handshake may time out."""
    send = {"prompt": list(range(1, CASE["block_size"] + 2)), "max_tokens": 8, "temperature": 0.0}
    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(lambda e: e.complete(send, uuid.uuid4().hex), engines.values()))
    for engine in engines.values():
        engine.gather_threads()
    for attempt in range(1, 6):
        try:
            if "prefill" in engines:
                handed_off(engines, send, uuid.uuid4().hex)
            return
        except CannotTell:
            if attempt == 5:
                raise
            time.sleep(2)


# --- requests --------------------------------------------------------------------------------------------------------


def handed_off(engines: dict[str, Engine], send: dict[str, Any], salt: str, between: Any = None) -> dict[str, Any]:
    """Prefill on P, then decode on D with P's parameters."""
    first = engines["prefill"].complete(send, salt, max_tokens=1, kv_transfer_params=CASE["keep_blocks"])
    parameters = first.get("kv_transfer_params")
    if not parameters:
        raise CannotTell("expected kv_transfer_params in the prefill engine's answer, found none")
    if between is not None:
        between()
    return engines["decode"].complete(send, salt, kv_transfer_params=parameters)


class Player:
    """Plays the stages of the case and keeps the answers by part."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self.engines = engines
        self.answers: dict[str, dict[str, Any]] = {}
        self.salts: dict[str, str] = {}

    def answering(self) -> Engine:
        return self.engines.get("decode") or self.engines["single"]

    def send(self, send: dict[str, Any], between: Any = None) -> None:
        salt = self.salts.setdefault(send["group"], uuid.uuid4().hex)
        if send["route"] == "prefill":
            answer = self.engines["prefill"].complete(send, salt)
        elif send["route"] == "local" or "prefill" not in self.engines:
            if between is not None:
                between()
            answer = self.answering().complete(send, salt)
        else:
            answer = handed_off(self.engines, send, salt, between)
        self.answers[send["part"]] = answer

    def play(self, stage: dict[str, Any]) -> None:
        if len(stage["sends"]) > 1:
            self.together(stage)
            return
        (only,) = stage["sends"]

        def between() -> None:
            for send in only["between"]:
                self.send(send)

        self.send(only, between)

    def together(self, stage: dict[str, Any]) -> None:
        """Requests at the same time; an engine may be held until all of them are queued."""
        first = stage["hold"] == "first" and "prefill" in self.engines
        held = (self.engines["prefill"] if first else self.answering()) if stage["hold"] else None
        early = [s for s in stage["sends"] if not s["after"]]
        answered = {s["part"]: threading.Event() for s in stage["sends"]}
        queued, last = threading.Semaphore(0), threading.Event()

        def run(send: dict[str, Any]) -> None:
            for part in send["after"]:
                if part in answered:
                    answered[part].wait()
            time.sleep(send["after_s"])

            def before() -> None:
                if send["last"]:
                    last.wait(60)
                    time.sleep(HOLD_S)
                if not send["after"]:
                    queued.release()

            try:
                if stage["hold"] == "answering":
                    self.send(send, before)
                else:
                    before()
                    self.send(send)
            finally:
                answered[send["part"]].set()

        for send in stage["sends"]:
            self.salts.setdefault(send["group"], uuid.uuid4().hex)
        if held is not None:
            held.ask("/pause?mode=keep&clear_cache=false", post=True)
        with ThreadPoolExecutor(len(stage["sends"])) as pool:
            try:
                futures = [pool.submit(run, s) for s in stage["sends"]]
                try:
                    for number, _ in enumerate(early, 1):
                        if number == len(early):
                            last.set()
                        queued.acquire(timeout=60)
                    last.set()
                    time.sleep(HOLD_S)
                finally:
                    if held is not None:
                        held.ask("/resume", post=True)
                for future in futures:
                    future.result()
            finally:
                # The pool waits for its threads, and one of them may wait for a request that will never be sent.
                for event in (last, *answered.values()):
                    event.set()


# --- judging ---------------------------------------------------------------------------------------------------------


def compare(part: str, answer: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What is wrong with an answer, in words; empty when nothing is."""
    choice = answer["choices"][0]
    problems = []
    if choice.get("prompt_token_ids") not in (None, wanted["prompt"]):
        problems.append(f"{part}: the engine saw other prompt tokens than were sent")
    tokens = choice.get("token_ids") or []
    expected = wanted["tokens"]
    print(f"{part}: prompt of {len(wanted['prompt'])} tokens, {CASE['block_size']} in a block")
    print(f"  expected {' '.join(map(str, expected))}")
    print(f"  observed {' '.join(map(str, tokens))}")
    if tokens != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b),
            min(len(tokens), len(expected)),
        )
        gap = margin(choice, at)
        if gap is not None and gap <= CASE["near_tie_nats"]:
            print(f"  first difference at output token {at}, where the two best are {gap:.3f} nats apart: no defect")
        else:
            problems.append(f"{part}: the first wrong token is output {at}")
    elif wanted.get("accepted") is not None:
        problems += steps(part, answer, wanted["accepted"], len(tokens))
    return problems


def margin(choice: dict[str, Any], at: int) -> float | None:
    tables = (choice.get("logprobs") or {}).get("top_logprobs") or []
    if at >= len(tables) or not tables[at]:
        return None
    best = sorted(tables[at].values(), reverse=True)
    return float(best[0] - best[1]) if len(best) > 1 else None


def steps(part: str, answer: dict[str, Any], expected: list[int], tokens: int) -> list[str]:
    """Accepted drafts per verify step, which the decode engine's first, padded step is no part of."""
    found = ((answer.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted")
    if found is None:
        print("  accepted drafts: this vLLM does not report them per request")
        return []
    readings = [found] + ([found[1:]] if found and found[0] == 0 else [])
    print(f"  accepted drafts per step: expected {expected}, observed {found}")
    slack = CASE["acceptance_slack"]
    if slack:
        wanted = sum(expected) / max(1, len(expected))
        near = [r for r in readings if r and abs(sum(r) / len(r) - wanted) <= slack * wanted]
        return [] if near else [f"{part}: other acceptance than expected by more than {100 * slack:.0f} %"]
    if any(same_as_far_as_asked(r, expected, tokens) for r in readings):
        return []
    return [f"{part}: right tokens, other accepted drafts"]


def same_as_far_as_asked(found: list[int], expected: list[int], tokens: int) -> bool:
    """The last step may accept past the end of a shorter output."""
    if found == expected:
        return True
    produced = 1
    for ours, theirs in zip(found, expected, strict=False):
        produced += ours + 1
        if ours != theirs and produced < tokens:
            return False
    return produced >= tokens


def outcome(engines: dict[str, Engine]) -> int:
    before = engines["decode"].bytes_moved() if "prefill" in engines else 0.0
    player = Player(engines)
    for stage in CASE["stages"]:
        player.play(stage)
    problems = [
        line for part, wanted in CASE["expected"].items() for line in compare(part, player.answers[part], wanted)
    ]
    if "prefill" in engines:
        time.sleep(1.0)
        moved = engines["decode"].bytes_moved() - before
        print(f"KV moved from P to D: {moved:,.0f} bytes")
        if not moved and not problems:
            raise CannotTell("right answers, but no KV moved: nothing was tested")
    for line in problems:
        print(line)
    print("THE DEFECT IS THERE" if problems else "as expected: the defect is not there")
    return 1 if problems else 0


# --- models ----------------------------------------------------------------------------------------------------------


def unpacked(folder: Path, given: list[str]) -> dict[str, str]:
    """Where each model lies: unpacked from this file, or as given."""
    models = dict(item.split("=", 1) for item in given if "=" in item)
    for name, wanted in CASE["models"].items():
        if name in models:
            continue
        if not wanted.get("files"):
            raise CannotTell(f"expected --model {name}=PATH: {wanted['name']} is not part of this file")
        for file, digest in wanted["files"].items():
            target = folder / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(carried(digest, f"{file} of {name}"))
        models[name] = str(folder / name)
    return models


def carried(digest: str, what: str) -> bytes:
    """A file that this one carries. Raises CannotTell when it is not what it should be."""
    with contextlib.suppress(KeyError, ValueError, zlib.error):
        data = zlib.decompress(base64.b85decode("".join(FILES[digest].split())))
        if hashlib.sha256(data).hexdigest() == digest:
            return data
    raise CannotTell(f"expected {what} with SHA-256 {digest}, found another: this file is damaged")


# --- command line ----------------------------------------------------------------------------------------------------


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=CASE.get("title"), epilog="Exit code 1: the defect is there; 0: not.")
    parser.add_argument("--python", default=sys.executable, help="the Python that vLLM is installed in")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=PATH", help="use this model instead")
    parser.add_argument(
        "--env", action="append", default=[], metavar="ROLE:NAME=VALUE", help="set a variable for one engine"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds for the engines to start")
    parser.add_argument("--keep-logs", metavar="FOLDER", help="keep the engines' logs there")
    options = parser.parse_args(argv)
    roles = {e["role"] for e in CASE["engines"]}
    for item in options.env:
        role, _, rest = item.partition(":")
        if role not in roles or "=" not in rest:
            parser.error(f"--env {item!r}: expected ROLE:NAME=VALUE with a role of {', '.join(sorted(roles))}")
    for item in options.model:
        if item.partition("=")[0] not in CASE["models"] or "=" not in item:
            parser.error(f"--model {item!r}: expected NAME=PATH with a name of {', '.join(CASE['models'])}")
    return options


def terminated(*_: object) -> NoReturn:
    """Once: engines are told to end, so that no request waits for them, and the program ends them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for engine in RUNNING:
        with contextlib.suppress(OSError):
            engine.tell_to_end()
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Try the case once; returns the exit code. Whatever keeps it from that is 2: Python would end with 1, which says
    that the defect is there."""
    try:
        code = kept(parsed(argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return cannot_tell("interrupted")
    except (CannotTell, OSError) as error:
        return cannot_tell(str(error))
    except Exception as error:
        return cannot_tell(f"{type(error).__name__}: {error}")


def cannot_tell(why: str) -> int:
    """Say so, wherever that can still be written."""
    words = f"cannot tell: {why}".replace(KEY, "<redacted>")
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            print(words, file=stream, flush=True)
            return 2
    return 2


def kept(options: argparse.Namespace) -> int:
    """Try the case with somebody who cleans up when this program is killed; returns the exit code."""
    with contextlib.suppress(OSError):
        # No pipe may get the number of an output that is closed.
        while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(handle)
    keeper = Keeper()
    try:
        for number in SIGNALS:
            # Whoever starts this with nohup means that.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, terminated)
        with tempfile.TemporaryDirectory(prefix=f"repro-{os.getuid()}-", ignore_cleanup_errors=True) as scratch:
            keeper.tell("folder", scratch)
            return attempt(options, Path(scratch), keeper)
    finally:
        keeper.end()


def attempt(options: argparse.Namespace, scratch: Path, keeper: Keeper) -> int:
    print(CASE["title"])
    print(f"recorded with vllm {CASE['versions'].get('vllm')}, {CASE['cell']}, {CASE['scenario']}")
    begun = time.monotonic()
    try:
        logs = Path(options.keep_logs or scratch)
        logs.mkdir(parents=True, exist_ok=True)
        engines = list(started(options, unpacked(scratch, options.model), logs, scratch, keeper))
        wait_ready(engines, options.limit)
        for engine in engines:
            engine.require_guarded()
        by_role = {e.role: e for e in engines}
        warm_up(by_role)
        print(f"{len(engines)} engines ready after {time.monotonic() - begun:.0f} s", flush=True)
        return outcome(by_role)
    finally:
        with ThreadPoolExecutor(max(1, len(RUNNING))) as pool:
            list(pool.map(Engine.stop, RUNNING))


def end_with(code: int) -> NoReturn:
    """End with this very code: Python tries again to write what could not be written, and ends with 120 then."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


FILES: dict[str, str] = {}  # the models' files by SHA-256, compressed, as Base85


if __name__ == "__main__":
    end_with(main())
