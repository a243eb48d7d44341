"""How a running server was started, as vLLM tells at ``/server_info`` with VLLM_SERVER_DEV_MODE=1."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from harness.engines.counters import ALL
from harness.engines.http import get
from harness.engines.log_facts import LogFacts
from harness.engines.needs import Needs
from harness.profiles.cells import Role
from harness.profiles.methods import Method, NoSpeculation
from harness.profiles.model import Profile

_PATH = "/server_info?config_format=json"
_TIMEOUT_S = 60.0
"""vLLM also looks at what its machine has, which takes seconds the first time."""
_CACHE = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_POSITIONS = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?\{[^}]*position="(\d{1,3})"', re.MULTILINE
)
_LABEL = re.compile(r'\b([a-z_]+)="([^"]*)"')
_SAID = {
    "block_size": "cache_config.block_size",
    "dtype": "model_config.dtype",
    "enforce_eager": "model_config.enforce_eager",
    "hf_overrides": "model_config.hf_overrides",
    "kv_cache_dtype": "cache_config.cache_dtype",
}
"""Settings of ``engine`` in a profile on which every answer depends, and where vLLM has them."""
_RUNNERS = {True: "V2", False: "V1"}


class ServerInfo(NamedTuple):
    """What a server tells of its settings."""

    config: Mapping[str, Any]
    """vLLM's ``VllmConfig``, by section."""
    variables: Mapping[str, Any]
    offered: bool
    """Whether it has ``/server_info``; without, its metrics tell the blocks of its cache and the drafts per step."""

    def say(self, path: str) -> Any:
        """Return a setting by its path, such as ``cache_config.block_size``; None if it is not told."""
        found: Any = self.config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def with_model(self, listed: Mapping[str, Any]) -> ServerInfo:
        """Return it with what the list of models says, where it does not say it itself."""
        told = self.config.get("model_config")
        return self._replace(config={**self.config, "model_config": {**listed, **(told or {})}}) if listed else self

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

    def differences(self, profile: Profile, method: Method, role: Role, needs: Needs | None = None) -> Iterator[str]:
        """Yield each setting on which judging relies and that the server says is not as in the profile.

        ``needs`` says what the requests need, so that a setting counts only where they do; None: all count.
        """
        for name, (wanted, found) in self._asked(profile, method, role).items():
            said = _plain(found)
            # The profile's ``auto`` is the type that engines compute in.
            wants = (wanted, profile.engine.dtype) if name.endswith("kv_cache_dtype") else (wanted,)
            if wanted is not None and said is not None and said not in wants:
                yield f"{name} {wanted}, found {str(said)[:60]}"
        yield from self.lacks(profile, needs)

    def untold(self, profile: Profile, method: Method, role: Role) -> list[str]:
        """Return the settings on which judging relies, and that the server does not tell."""
        asked = self._asked(profile, method, role)
        asked[_STEP] = (profile.engine.max_num_batched_tokens, self.say(_STEP_PATH))
        return [name for name, (wanted, found) in asked.items() if wanted is not None and found is None]

    def _asked(self, profile: Profile, method: Method, role: Role) -> dict[str, tuple[Any, Any]]:
        """Return what the profile and the server say of each setting on which every answer depends."""
        engine = profile.engine
        asked = {f"engine.{name}": (getattr(engine, name), self.say(path)) for name, path in _SAID.items()}
        ranks = self.say("parallel_config.tensor_parallel_size")
        asked["engine.tensor_parallel"] = (engine.tensor_parallel.of(role), ranks)
        if profile.batch_invariant:
            asked["VLLM_BATCH_INVARIANT"] = (True, self.variables.get("VLLM_BATCH_INVARIANT"))
        if role == "prefill" and engine.by_nixl:
            asked["engine.kv_lease_s"] = (engine.kv_lease_s, self.lease_s)
        drafts = self.say("speculative_config.num_speculative_tokens")
        told = "speculative_config" in self.config
        asked["num_speculative_tokens"] = (method.draft_tokens, (drafts or 0) if told else None)
        if not isinstance(method, NoSpeculation):
            # vLLM calls every kind of multi-token prediction ``mtp``.
            name = "mtp" if method.vllm_method.endswith("_mtp") else method.vllm_method
            asked["method"] = (name, self.say("speculative_config.method"))
        return asked

    @property
    def lease_s(self) -> Any:
        """Seconds of P's lease; None where it is not told that NIXL's connector is there."""
        if not str(self.say("kv_transfer_config.kv_connector")).startswith("Nixl"):
            return None
        lease = self.say("kv_transfer_config.kv_connector_extra_config.kv_lease_duration")
        return _USUAL_LEASE_S if lease is None else lease

    def lacks(self, profile: Profile, needs: Needs | None) -> Iterator[str]:
        """Yield each setting that these requests need and that the server says is not as in the profile, beyond those
        on which every answer depends. ``needs`` is as in ``differences``."""
        yield from self._steps(profile, needs)
        if needs is not None:
            yield from self._too_small(profile, needs)

    def _steps(self, profile: Profile, needs: Needs | None) -> Iterator[str]:
        """Yield that steps are of another size, unless all prompts fit one of either size."""
        wanted, found = profile.engine.max_num_batched_tokens, self.say(_STEP_PATH)
        if wanted is None or not isinstance(found, int) or found == wanted:
            return
        # Speculation takes as many tokens of each.
        taken = found - (self.facts.step_tokens or found)
        for_ = needs.of_more_than(min(wanted, found) - taken) if needs is not None else []
        if needs is None or for_:
            yield f"{_STEP} {wanted}{_for(for_)}, found {found}"

    def _too_small(self, profile: Profile, needs: Needs) -> Iterator[str]:
        context, most = self.say("model_config.max_model_len"), self.say("scheduler_config.max_num_seqs")
        if isinstance(context, int) and context < needs.context:
            yield f"engine.max_model_len of at least {needs.context}, a prompt with its answer, found {context}"
        if isinstance(most, int) and most < profile.engine.max_num_seqs and needs.together:
            yield f"engine.max_num_seqs {profile.engine.max_num_seqs}{_for(needs.together)}, found {most}"
        if needs.sharing and self.say(PREFIX_CACHING) is False:
            yield f"prefix caching{_for(needs.sharing)}, found it off (--no-enable-prefix-caching)"


_STEP, _STEP_PATH = "engine.max_num_batched_tokens", "scheduler_config.max_num_batched_tokens"
PREFIX_CACHING = "cache_config.enable_prefix_caching"
_USUAL_LEASE_S = 30


def _for(scenarios: Sequence[str]) -> str:
    return f" for {', '.join(scenarios)}" if scenarios else ""


def _plain(found: Any) -> Any:
    return found.removeprefix("torch.") if isinstance(found, str) else found


def ask(root: str, headers: Mapping[str, str]) -> ServerInfo:
    """Ask a server for its settings; those that it does not tell are missing."""
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        told = get(f"{root}{_PATH}", headers, _TIMEOUT_S).json()
        # Versions without this format answer with one text, which says less.
        if isinstance(told["vllm_config"], Mapping):
            variables = told.get("vllm_env")
            return ServerInfo(told["vllm_config"], variables if isinstance(variables, Mapping) else {}, True)
    with contextlib.suppress(httpx.HTTPError):
        text = get(f"{root}{ALL}", headers, _TIMEOUT_S).content.decode("utf-8", errors="replace")
        return ServerInfo(_in_metrics(text), {}, False)
    return ServerInfo({}, {}, False)


def _in_metrics(text: str) -> dict[str, Any]:
    """Return what the metrics of a server tell of its settings, by the names of vLLM's ``VllmConfig``."""
    found = _CACHE.search(text)
    if found is None:
        return {}
    cache = {name: _value(value) for name, value in _LABEL.findall(found[1]) if name in _OF_CACHE}
    # Counters of positions are there from the start.
    positions = [int(n) for n in _POSITIONS.findall(text)]
    drafts = {"num_speculative_tokens": max(positions) + 1} if positions else None
    return {"cache_config": cache, "speculative_config": drafts}


_OF_CACHE = ("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks", "num_gpu_blocks_override")


def _value(text: str) -> Any:
    return int(text) if text.isdecimal() else {"True": True, "False": False, "None": None}.get(text, text)
