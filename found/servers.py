"""What the scripts in this folder share: start ``vllm serve`` lines, ask the servers, end them.

Needs the Python that vLLM is installed in (and NIXL for pairs) and the standard library. Servers listen on loopback and
end with the script; their logs are ``ROLE.log`` beside it. Models and prompts are those of the checkout.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = """
HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1
LD_PRELOAD=$VIRTUAL_ENV/lib/libiomp5.so VLLM_WORKER_MULTIPROC_METHOD=fork VLLM_ENABLE_V1_MULTIPROCESSING=0
VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 UCX_TLS=tcp,sm,self UCX_NET_DEVICES=lo
"""
"""Set for all servers, as CPU engines need it; what a line begins with is set for its server alone."""
LIBC, LIMIT_S = ctypes.CDLL(None), 300
KEPT = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
"""Parameters of the prefill leg of a hand-off, which keep its blocks."""


class Answer(NamedTuple):
    tokens: list[int]
    text: str
    metrics: Mapping[str, Any] | None
    """Of ``--per-request-spec-decode-metrics``."""
    whole: Mapping[str, Any]

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each verify step."""
        return list((self.metrics or {}).get("per_step_accepted") or [])


class Servers:
    """Servers by role, each started by its line in a shell's words."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        self._lines, self._key = lines, os.urandom(16).hex()
        self._ports = {role: int(re.search(r"--port (\d+)", line)[1]) for role, line in lines.items()}  # type: ignore[index]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._patience_s = 120.0

    def __enter__(self) -> Servers:
        try:
            for role in self._lines:
                self._start(role)
            for role in self._lines:
                self._wait_for(role)
            if "prefill" in self._lines:
                self._shake_hands()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def _start(self, role: str) -> None:
        if not socket.socket().connect_ex(("127.0.0.1", self._ports[role])):
            raise RuntimeError(f"expected port {self._ports[role]} to be free, found it taken: change it in the line")
        home = str(Path(sys.executable).parent.parent)
        env = os.environ | {"PATH": f"{home}/bin:{os.environ.get('PATH', os.defpath)}", "VLLM_API_KEY": self._key}
        words = shlex.split(f"{VARIABLES} {self._lines[role]}".replace("\\\n", " "))
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            env[name] = value.replace("$VIRTUAL_ENV", home)
        at = words.index("vllm")
        if not list(metadata.distributions(name="vllm")):  # CPU builds have another name, with which `vllm serve` ends.
            words[at : at + 2] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
        with self._log(role).open("wb") as log:
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            how["preexec_fn"] = lambda: LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with this program
            self._running[role] = subprocess.Popen(words, env=env, cwd=ROOT, **how)

    def _log(self, role: str) -> Path:
        return Path(sys.argv[0]).resolve().parent / f"{role}.log"

    def log(self, role: str) -> str:
        """Return what a server has written."""
        return self._log(role).read_text(errors="replace")

    def _wait_for(self, role: str) -> None:
        begun = time.monotonic()
        while self._running[role].poll() is None and time.monotonic() < begun + LIMIT_S:
            with contextlib.suppress(RuntimeError):
                self.ask(role, "/health")
                return
            time.sleep(0.3)
        raise RuntimeError(f"expected a {role} server that answers, found none:\n{self.log(role)[-3000:]}")

    def _shake_hands(self) -> None:
        """The first handshake of NIXL may time out."""
        for _ in range(5):
            with contextlib.suppress(RuntimeError):
                self.hand_off([0, 2, *range(100, 140), 1, 3], salt="warm-up", max_tokens=8)
                return
            time.sleep(2)

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Wait for answers for so long, and then close the connection."""
        before, self._patience_s = self._patience_s, seconds
        try:
            yield
        finally:
            self._patience_s = before

    def ends(self, role: str, within_s: float = 15.0) -> bool:
        """Return whether a server ends, or its engine, so that it answers nothing any more."""
        begun = time.monotonic()
        while time.monotonic() < begun + within_s:
            try:
                self.ask(role, "/health")
            except RuntimeError:
                return True
            time.sleep(0.5)
        return False

    def ask(self, role: str, path: str, body: Any = None) -> str:
        """Return the text of an answer; a body is posted. Raises RuntimeError when there is none."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:{self._ports[role]}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._patience_s) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{role}: HTTP {error.code}: {error.read().decode()[:300]}") from error
        except OSError as error:
            raise RuntimeError(f"{role}: {error}") from error

    def complete(self, role: str, prompt: list[int], salt: str = "a", **fields: Any) -> Answer:
        """Complete a prompt of token ids. Requests of one salt share cached blocks."""
        body = {"model": "target", "prompt": prompt, "max_tokens": 192, "temperature": 0, "cache_salt": salt}
        whole = json.loads(self.ask(role, "/v1/completions", body | {"return_token_ids": True} | fields))
        choice, metrics = whole["choices"][0], (whole.get("metrics") or {}).get("speculative_decoding")
        return Answer(list(choice["token_ids"]), choice["text"], metrics, whole)

    def hand_off(self, prompt: list[int], salt: str = "a", **fields: Any) -> Answer:
        """Complete a prompt on D after P has prefilled it, as a router does."""
        first = self.complete("prefill", prompt, salt, max_tokens=1, kv_transfer_params=KEPT)
        given = first.whole["kv_transfer_params"]
        return self.complete("decode", prompt, salt, **{"kv_transfer_params": given, **fields})

    def count(self, role: str, name: str, label: str = "") -> float:
        """Return the sum of a counter over its labels, or over those with this value."""
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", self.ask(role, "/metrics"), re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels)


def prompt(name: str) -> list[int]:
    """Return a prompt of the checkout: a beginning, n words, an end. The models repeat the words."""
    for line in (ROOT / "prompts" / "probe.jsonl").read_text().splitlines():
        if json.loads(line).get("id") == name:
            return list(json.loads(line)["ids"])
    raise RuntimeError(f"expected a prompt {name} in prompts/probe.jsonl, found none")


def main(show: Callable[[], Iterator[str]]) -> None:
    """Print what is wrong and exit with 1; with 0 when nothing is, and with 2 when that cannot be told."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        wrong = list(show())
    except (Exception, KeyboardInterrupt) as error:
        print(f"cannot tell: {error!r}")
        sys.exit(2)
    print(*wrong, "THE DEFECT SHOWS" if wrong else "the defect does not show", sep="\n")
    sys.exit(bool(wrong))
