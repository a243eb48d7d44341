"""How a running server was started, as vLLM tells at ``/server_info`` with VLLM_SERVER_DEV_MODE=1."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import httpx

from harness.engines.counters import ALL
from harness.engines.http import get
from harness.engines.log_facts import LogFacts
from harness.profiles.cells import Role
from harness.profiles.methods import Method, NoSpeculation
from harness.profiles.model import Profile

_PATH = "/server_info?config_format=json"
_TIMEOUT_S = 60.0
"""vLLM also looks at what its machine has, which takes seconds the first time."""
_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d{1,9})"', re.MULTILINE)
_SAID = {
    "block_size": "cache_config.block_size",
    "dtype": "model_config.dtype",
    "enforce_eager": "model_config.enforce_eager",
    "hf_overrides": "model_config.hf_overrides",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
}
"""Settings of ``engine`` in a profile, and where vLLM has them."""
_RUNNERS = {True: "V2", False: "V1"}


class ServerInfo(NamedTuple):
    """What a server tells of its settings."""

    config: Mapping[str, Any]
    """vLLM's ``VllmConfig``, by section."""
    variables: Mapping[str, Any]
    offered: bool
    """Whether it has ``/server_info``; without, its metrics tell the block size alone."""

    def say(self, path: str) -> Any:
        """Return a setting by its path, such as ``cache_config.block_size``; None if it is not told."""
        found: Any = self.config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    @property
    def facts(self) -> LogFacts:
        """What the log of an engine tells that the harness starts."""
        steps = [self.say(f"scheduler_config.max_num_{kind}_tokens") for kind in ("batched", "scheduled")]
        runner = self.variables.get("VLLM_USE_V2_MODEL_RUNNER")
        return LogFacts(
            model_runner=_RUNNERS.get(runner) if isinstance(runner, bool) else None,
            attention_backend=None,
            step_tokens=min((n for n in steps if isinstance(n, int)), default=None),
        )

    def differences(self, profile: Profile, method: Method, role: Role) -> Iterator[str]:
        """Yield each setting on which judging relies and that the server says is not as in the profile."""
        engine = profile.engine
        asked = {f"engine.{name}": (getattr(engine, name), self.say(path)) for name, path in _SAID.items()}
        ranks = self.say("parallel_config.tensor_parallel_size")
        asked["engine.tensor_parallel"] = (engine.tensor_parallel.of(role), ranks)
        if profile.batch_invariant:
            asked["VLLM_BATCH_INVARIANT"] = (True, self.variables.get("VLLM_BATCH_INVARIANT"))
        if role == "prefill" and str(self.say("kv_transfer_config.kv_connector")).startswith("Nixl"):
            lease = self.say("kv_transfer_config.kv_connector_extra_config.kv_lease_duration")
            asked["engine.kv_lease_s"] = (engine.kv_lease_s, 30 if lease is None else lease)
        if "speculative_config" in self.config:
            drafts = self.say("speculative_config.num_speculative_tokens")
            asked["num_speculative_tokens"] = (method.draft_tokens, drafts or 0)
        if not isinstance(method, NoSpeculation):
            # vLLM calls every kind of multi-token prediction ``mtp``.
            name = "mtp" if method.vllm_method.endswith("_mtp") else method.vllm_method
            asked["method"] = (name, self.say("speculative_config.method"))
        for name, (wanted, found) in asked.items():
            said = found.removeprefix("torch.") if isinstance(found, str) else found
            if wanted not in (None, "auto", said) and said is not None:
                yield f"{name} {wanted}, found {str(said)[:60]}"


def ask(root: str, headers: Mapping[str, str]) -> ServerInfo:
    """Ask a server for its settings; those that it does not tell are missing."""
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        told = get(f"{root}{_PATH}", headers, _TIMEOUT_S).json()
        # Versions without this format answer with one text, which says less.
        if isinstance(told["vllm_config"], Mapping):
            variables = told.get("vllm_env")
            return ServerInfo(told["vllm_config"], variables if isinstance(variables, Mapping) else {}, True)
    config = {}
    with contextlib.suppress(httpx.HTTPError):
        text = get(f"{root}{ALL}", headers, _TIMEOUT_S).content.decode("utf-8", errors="replace")
        if found := _BLOCK_SIZE.search(text):
            config = {"cache_config": {"block_size": int(found[1])}}
    return ServerInfo(config, {}, False)
