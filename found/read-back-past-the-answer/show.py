"""bidirectional_kv_xfer with EAGLE3: P's own token of the next turn is wrong

    python show.py      # of the environment that has vLLM, and NIXL where there are two servers

starts the servers below, sends them the requests below and compares the answers with the right ones. Exit code 1: the
defect shows. 0: it does not. 2: that cannot be told, and why. Nothing is fetched; servers listen on loopback and end
with this program. To start one by hand, export the variables and copy its command. Seen with vLLM 0.32.0.
"""

import contextlib, ctypes, functools, importlib.metadata, itertools, json, os, re, shlex, signal, socket, subprocess
import sys, time, urllib.request
from pathlib import Path
from typing import Any

VARIABLES = r"""
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 \
    VLLM_WORKER_MULTIPROC_METHOD=fork VLLM_ENABLE_V1_MULTIPROCESSING=0 TORCH_COMPILE_DISABLE=1 \
    LD_PRELOAD=$VIRTUAL_ENV/lib/libiomp5.so VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 UCX_TLS=tcp,sm,self \
    UCX_NET_DEVICES=lo"""

SERVERS = {
    "prefill": r"""
VLLM_NIXL_SIDE_CHANNEL_PORT=5640 VLLM_CPU_OMP_THREADS_BIND=0 taskset -c 0 vllm serve ../../models/probe/target \
    --host 127.0.0.1 --port 8340 --served-model-name target --tokenizer ../../models/probe/tokenizer \
    --load-format safetensors --dtype float32 --block-size 32 --max-model-len 416 --max-num-seqs 4 --seed 0 \
    --no-enable-log-requests --enforce-eager --num-gpu-blocks-override 700 --max-num-batched-tokens 192 \
    --speculative-config '{"method": "eagle3", "model": "../../models/probe/eagle3", "num_speculative_tokens": 3}' \
    --per-request-spec-decode-metrics detailed \
    --kv-transfer-config '{"kv_buffer_device": "cpu", "kv_connector": "NixlConnector", "kv_connector_extra_config": {"bidirectional_kv_xfer": true, "decoder_kv_blocks_ttl": 8, "kv_lease_duration": 30, "kv_recompute_threshold": 16, "num_threads": 0}, "kv_load_failure_policy": "recompute", "kv_role": "kv_both"}'""",
    "decode": r"""
VLLM_NIXL_SIDE_CHANNEL_PORT=5641 VLLM_CPU_OMP_THREADS_BIND=1 taskset -c 1 vllm serve ../../models/probe/target \
    --host 127.0.0.1 --port 8341 --served-model-name target --tokenizer ../../models/probe/tokenizer \
    --load-format safetensors --dtype float32 --block-size 32 --max-model-len 416 --max-num-seqs 4 --seed 0 \
    --no-enable-log-requests --enforce-eager --num-gpu-blocks-override 700 --max-num-batched-tokens 192 \
    --speculative-config '{"method": "eagle3", "model": "../../models/probe/eagle3", "num_speculative_tokens": 3}' \
    --per-request-spec-decode-metrics detailed \
    --kv-transfer-config '{"kv_buffer_device": "cpu", "kv_connector": "NixlConnector", "kv_connector_extra_config": {"bidirectional_kv_xfer": true, "decoder_kv_blocks_ttl": 8, "kv_lease_duration": 30, "kv_recompute_threshold": 16, "num_threads": 0}, "kv_load_failure_policy": "recompute", "kv_role": "kv_both"}'""",
}

STAGES = [{'sends': [{'part': 'donor', 'group': 'a', 'max_tokens': 76, 'prompt': [0, 2, 281, 160, 241, 148, 496, 167, 336, 435,
    458, 130, 249, 275, 126, 286, 132, 20, 216, 366, 338, 163, 34, 17, 105, 261, 459, 351, 337, 221, 47, 137, 122, 347,
    223, 195, 481, 258, 23, 362, 179, 373, 484, 191, 355, 208, 107, 9, 414, 155, 384, 438, 264, 40, 111, 259, 108, 165,
    398, 425, 489, 124, 244, 119, 141, 395, 157, 61, 325, 503, 318, 101, 120, 254, 219, 346, 491, 310, 80, 207, 33,
    115, 18, 311, 78, 218, 32, 369, 36, 100, 434, 236, 370, 166, 381, 63, 46, 90, 174, 103, 424, 340, 274, 388, 245,
    22, 456, 462, 377, 199, 197, 175, 232, 92, 446, 1, 3], 'right': {'tokens': [281, 160, 241, 148, 496, 167, 336, 435,
    458, 130, 249, 275, 126, 286, 132, 20, 216, 366, 338, 163, 34, 17, 105, 261, 459, 351, 337, 221, 47, 137, 122, 347,
    223, 195, 481, 258, 23, 362, 179, 373, 484, 191, 355, 208, 107, 9, 414, 155, 384, 438, 264, 40, 111, 259, 108, 165,
    398, 425, 489, 124, 244, 119, 141, 395, 157, 61, 325, 503, 318, 101, 120, 254, 219, 346, 491, 310], 'accepted': [3,
    3, 1, 3, 3, 3, 1, 3, 3, 3, 1, 3, 2, 3, 3, 3, 0, 2, 3, 3, 2, 3]}}]}, {'sends': [{'part': 'subject', 'group': 'a',
    'max_tokens': 24, 'prompt': [0, 2, 281, 160, 241, 148, 496, 167, 336, 435, 458, 130, 249, 275, 126, 286, 132, 20,
    216, 366, 338, 163, 34, 17, 105, 261, 459, 351, 337, 221, 47, 137, 122, 347, 223, 195, 481, 258, 23, 362, 179, 373,
    484, 191, 355, 208, 107, 9, 414, 155, 384, 438, 264, 40, 111, 259, 108, 165, 398, 425, 489, 124, 244, 119, 141,
    395, 157, 61, 325, 503, 318, 101, 120, 254, 219, 346, 491, 310, 80, 207, 33, 115, 18, 311, 78, 218, 32, 369, 36,
    100, 434, 236, 370, 166, 381, 63, 46, 90, 174, 103, 424, 340, 274, 388, 245, 22, 456, 462, 377, 199, 197, 175, 232,
    92, 446, 1, 3, 281, 160, 241, 148, 496, 167, 336, 435, 458, 130, 249, 275, 126, 286, 132, 20, 216, 366, 338, 163,
    34, 17, 105, 261, 459, 351, 337, 221, 47, 137, 122, 347, 223, 195, 481, 258, 23, 362, 179, 373, 484, 191, 355, 208,
    107, 9, 414, 155, 384, 438, 264, 40, 111, 259, 108, 165, 398, 425, 489, 124, 244, 119, 141, 395, 157, 61, 325, 503,
    318, 101, 120, 254, 219, 346, 491], 'right': {'tokens': [310, 80, 207, 33, 115, 18, 311, 78, 218, 32, 369, 36, 100,
    434, 236, 370, 166, 381, 63, 46, 90, 174, 103, 424], 'accepted': [3, 3, 1, 3, 3, 3, 3]}, 'read_back': True}]}]

CASE = {'model': 'target', 'block_size': 32, 'tries': 1, 'seen': 'a rate of 100 % (as --rate says)', 'models':
    {'../../models/probe/tokenizer': 'tokenizer', '../../models/probe/target': 'target', '../../models/probe/eagle3':
    'eagle3'}, 'near_tie_nats': 0.02, 'logprob_nats': 0.001}

LIMIT_S, TRIES, SETTLE_S = 300, min(CASE["tries"], 60), 1.0
KEY, HERE, LIBC = os.urandom(16).hex(), Path(__file__).resolve().parent, ctypes.CDLL(None)
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PORTS = {role: int(command.partition("--port ")[2].split()[0]) for role, command in SERVERS.items()}
RUNNING: dict[str, subprocess.Popen[bytes]] = {}
KEEP = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
KEEP |= {"remote_host": None, "remote_port": None}
MOVED = re.compile(r"^vllm:nixl_bytes_transferred_sum.* (\S+)$", re.MULTILINE)
LAST: dict[str, Any] = {}
say = functools.partial(print, sep="\n", flush=True)

def compare(send: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what is wrong with an answer; empty if it is right."""
    part, expected, choice = send["part"], send["right"]["tokens"], found["choices"][0]
    tokens, problems = [int(token) for token in choice["token_ids"]], []
    say(f"{part}: {len(send['prompt'])} prompt tokens", f"  expected {expected}", f"  found    {tokens}")
    if choice.get("prompt_token_ids") not in (None, send["prompt"]):
        problems.append(f"{part}: the server saw other prompt tokens than were sent")
    for own in found["prefill"].get("choices", ()):
        apart = abs(gap(own, 0) - gap(choice, 0))
        if own["token_ids"][:1] != expected[:1] and gap(own, 0) > CASE["near_tie_nats"]:
            problems.append(f"{part}: the prefill server's own token is {own['token_ids'][:1]}, not {expected[:1]}")
        elif own["token_ids"][:1] == tokens[:1] and CASE["logprob_nats"] < apart < float("inf"):
            problems.append(f"{part}: P and D, which computes the first token anew, are {apart:.3g} nats apart on it")
    if tokens != expected:
        at = next((n for n, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(tokens))
        if gap(choice, at) <= CASE["near_tie_nats"]:
            say(f"  no defect: the best two tokens of output {at} are {gap(choice, at):.3f} nats apart")
            return problems
        return [*problems, f"{part}: the first wrong token is output {at}"]
    steps = ((found.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted")
    if steps is not None and (accepted := send["right"].get("accepted")) is not None:
        say(f"  accepted drafts per step: expected {accepted}", f"                            found    {steps}")
        readings = [steps, steps[1:]] if steps[:1] == [0] else [steps]
        # D's first step after a hand-off may have no drafts, and the last accept some past the end of the answer.
        if not any(len(told) == len(accepted) and told[:-1] == accepted[:-1] for told in readings):
            problems.append(f"{part}: right tokens, different accepted drafts")
    return problems

def gap(choice: dict[str, Any], at: int) -> float:
    """Return the nats between the two best tokens at an output position; infinite where they are not told."""
    tables = (choice.get("logprobs") or {}).get("top_logprobs") or []
    best = sorted((tables[at] or {}).values(), reverse=True)[:2] if at < len(tables) else []
    return best[0] - best[1] if len(best) == 2 else float("inf")

def ask(role: str, path: str, body: Any = None, timeout: float = 120) -> str:
    """Return the text of an answer, which no proxy sees; a body is posted. Raises RuntimeError when there is none."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    try:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:{PORTS[role]}{path}", data, headers)
        with OPENER.open(request, timeout=timeout) as response:
            return str(response.read().decode(errors="replace"))
    except Exception as error:
        said = getattr(error, "read", bytes)()[:300].decode(errors="replace")
        raise RuntimeError(f"expected an answer of the {role} server to {path}, found {error!r} {said}") from error

def complete(role: str, send: dict[str, Any], salt: str, **more: Any) -> dict[str, Any]:
    """Return a completion. With ``salt``, no prompt of another try is in the prefix cache."""
    body = {"temperature": 0} | {k: send[k] for k in ("prompt", "max_tokens", "temperature") if k in send} | more
    body |= {"model": CASE["model"], "seed": 0, "add_special_tokens": False, "cache_salt": salt + send["group"]}
    body |= {"return_token_ids": True, "logprobs": 2, "return_tokens_as_token_ids": True}
    return dict(json.loads(ask(role, "/v1/completions", body)))

def answer(send: dict[str, Any], salt: str) -> dict[str, Any]:
    """Ask the server; in a pair P, and then D with what P says of its blocks."""
    if send.get("route"):
        return complete("prefill" if send["route"] == "prefill" else "decode", send, salt) | {"prefill": {}}
    keep = LAST if send.get("read_back") else KEEP
    first = complete("prefill", send, salt, max_tokens=1, kv_transfer_params=keep)
    if not first.get("kv_transfer_params"):
        raise RuntimeError("expected kv_transfer_params in the prefill server's answer, found none")
    for other in send.get("between", ()):
        answer(other, salt)
    found = complete("decode", send, salt, kv_transfer_params=first["kv_transfer_params"])
    LAST.update(found.get("kv_transfer_params") or {})
    return found | {"prefill": first}
def start(role: str) -> None:
    """Start a server in a session of its own. Raises RuntimeError when its port is taken."""
    if not socket.socket().connect_ex(("127.0.0.1", PORTS[role])):
        raise RuntimeError(f"expected port {PORTS[role]} to be free, found it taken: change it in the command")
    home = str(Path(sys.executable).parent.parent)
    env = os.environ | {"PATH": f"{home}/bin:{os.environ.get('PATH', os.defpath)}", "VLLM_API_KEY": KEY}
    text = f"{VARIABLES} {SERVERS[role]}".replace("export ", "").replace("\\\n", " ").replace("$VIRTUAL_ENV", home)
    if not list(importlib.metadata.distributions(name="vllm")):  # As of CPU builds, with which `vllm serve` ends.
        text = text.replace("vllm serve", f"{sys.executable} -m vllm.entrypoints.openai.api_server --model")
    words = shlex.split(text)
    while "=" in words[0]:
        name, _, env[name] = words.pop(0).partition("=")
    with (HERE / f"{role}.log").open("wb") as log:
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        how["preexec_fn"] = lambda: LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with this program
        RUNNING[role] = subprocess.Popen(words, env=env, cwd=HERE, **how)

def wait_for(role: str) -> None:
    """Wait until a server answers. Raises RuntimeError when it ends, or does not within LIMIT_S."""
    begun = time.monotonic()
    while (code := RUNNING[role].poll()) is None and time.monotonic() < begun + LIMIT_S:
        with contextlib.suppress(RuntimeError):
            ask(role, "/health", timeout=5)
            return
        time.sleep(0.2)
    tail = "\n".join((HERE / f"{role}.log").read_text(errors="replace").splitlines()[-15:])
    raise RuntimeError(f"expected a {role} server that answers, found none (exit code {code}):\n{tail}")

def attempt() -> int:
    """Try the case until the defect shows; return the exit code."""
    for folder, name in CASE["models"].items():
        if not (HERE / folder).is_dir():
            raise RuntimeError(f"expected the model {name} in the folder {folder} beside this file, found none")
    for begin, role in itertools.product((start, wait_for), SERVERS):
        begin(role)
    for number in range(5):
        with contextlib.suppress(RuntimeError):  # The first NIXL handshake may time out.
            answer({"group": f"{number}", "prompt": [1] * (CASE["block_size"] + 1), "max_tokens": 8}, "warm-up ")
            break
        time.sleep(2)
    for number in range(1, TRIES + 1):
        problems: list[str] = []
        moved = -sum(map(float, MOVED.findall(ask("decode", "/metrics"))))
        for send in [send for stage in STAGES for send in stage["sends"]]:
            found = answer(send, f"{number} ")
            problems += compare(send, found) if "right" in send else []
        if problems:
            say(*problems, "THE DEFECT SHOWS")
            return 1
        time.sleep(SETTLE_S)
        moved += sum(map(float, MOVED.findall(ask("decode", "/metrics"))))
        say(f"KV moved from P to D: {moved:,.0f} bytes")
        if not moved:
            raise RuntimeError("right answers, but no KV moved: nothing was tested")
    say(f"the defect does not show (quiet tries: {TRIES}; seen at {CASE['seen']})")
    return 0

def main() -> int:
    """Return the exit code. Whatever keeps the case from being tried is 2: Python would end with 1, the defect's."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        return attempt()
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            why = error if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            say(f"cannot tell: {why}")
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
