"""What a server that runs already lists at /v1/models, and in plain words what it answers instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from harness.engines.http import get
from harness.errors import UsageError

TIMEOUT_S = 10.0
_NO_SUCH_PATH = ("status 404", "status 405")
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_NO_CONNECTION = "no connection"
_REMEDIES = {
    _UNTRUSTED: "name the file with the certificate of its authority in SSL_CERT_FILE",
    "status 401": "name the variable with its key (--key-variable)",
    _NO_CONNECTION: "start it, or correct the address",
}
_NO_MODEL = "give the address of vLLM's own server"


class ListedModels(NamedTuple):
    """The models that a server lists."""

    names: tuple[str, ...]
    """Empty when it lists none."""
    found: str
    """What it answered instead, for the end of a message that says what was expected."""
    settings: Mapping[str, Mapping[str, Any]] = {}
    """What it says of models that are no adapters, by their names: ``model``, the folder or name that was loaded, and
    ``max_model_len``."""

    @property
    def has_no_list(self) -> bool:
        """Whether the server has no such path."""
        return not self.names and self.found in _NO_SUCH_PATH

    def choose(self, option: str, url: str, wanted: str | None) -> str:
        """Return the model to ask for: the ``wanted`` one, or the only one. Raises UsageError when there is none."""
        if not self.names:
            remedy = next((words for part, words in _REMEDIES.items() if part in self.found), _NO_MODEL)
            raise UsageError(
                f"--{option} {url}: expected a server that lists its model at /v1/models, found {self.found}; {remedy}"
            )
        if wanted is not None and wanted not in self.names:
            raise UsageError(
                f"--model {wanted}: the server at --{option} {url} does not list it; it lists {', '.join(self.names)}"
            )
        if wanted is None and len(self.names) > 1:
            raise UsageError(
                f"--{option} {url}: the server lists {len(self.names)} models ({', '.join(self.names)}); say which one "
                "to ask with --model"
            )
        return wanted or self.names[0]


def listed_models(root: str, headers: Mapping[str, str]) -> ListedModels:
    """Ask a server for its models."""
    try:
        answer = get(f"{root}/v1/models", headers, TIMEOUT_S)
    except httpx.HTTPError as error:
        return ListedModels((), trouble(error))
    if answer.status_code != httpx.codes.OK:
        return ListedModels((), f"status {answer.status_code}")
    try:
        return _read(answer.json())
    except ValueError:
        return ListedModels((), "an HTML page" if _is_html(answer) else "an answer that is not JSON")


def _read(answer: Any) -> ListedModels:
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list):
        return ListedModels((), "JSON without a list of models")
    names = tuple(m["id"] for m in models if isinstance(m, dict) and isinstance(m.get("id"), str))
    # vLLM lists an adapter of the same name as its base model once each.
    settings = {m["id"]: _settings(m) for m in models if isinstance(m, dict) and m.get("id") in names}
    found = "a list without names of models" if models else "an empty list"
    return ListedModels(tuple(dict.fromkeys(names)), found, settings)


def _settings(model: Mapping[str, Any]) -> dict[str, Any]:
    root, longest = model.get("root"), model.get("max_model_len")
    if model.get("parent") is not None:
        return {}
    told = {"model": root} if isinstance(root, str) else {}
    return told | ({"max_model_len": longest} if isinstance(longest, int) else {})


def _is_html(answer: httpx.Response) -> bool:
    return "html" in answer.headers.get("Content-Type", "") or answer.text.lstrip().startswith("<")


def trouble(error: httpx.HTTPError) -> str:
    """Return in plain words why there is no answer."""
    if _UNTRUSTED in str(error):
        return f"a certificate that this machine does not trust ({_UNTRUSTED})"
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, httpx.ConnectError):
        return f"{_NO_CONNECTION} ({str(error).partition('] ')[2] or error})"
    return f"a broken answer ({error})"
