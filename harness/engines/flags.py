"""Arguments and variables under test: what the user of the command line adds to engines.

A profile may add only what an allow-list permits (``harness.profiles.engine_args``), because it is data that others may
have written. What is typed on the command line is the user's own. It is recorded with the run and shown in every
report, and no part of a baseline's identity: whether answers stay as they were without it is what the run is to tell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import get_args

from harness import redact
from harness.errors import UsageError
from harness.history.records import LegRole
from harness.profiles.cells import Role
from harness.profiles.engine_args import SETTINGS, for_p, setting_of
from harness.profiles.engine_config import OnPrefill
from harness.util.strict import Strict

_ARGUMENT = re.compile(r"--[A-Za-z][A-Za-z0-9_.-]*(=.*)?", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_ROLES = get_args(LegRole)
_DEVICES = "engine.tensor_parallel"
"""The setting by which engines get devices, which is no argument where it is 1."""
_PREFIX = re.compile(rf"({'|'.join(_ROLES)}):(.*)", re.DOTALL)


class Flag(Strict):
    """One argument or variable, for the engines of a role or, with None, for all."""

    role: LegRole | None
    text: str


class EngineFlags(Strict):
    """What is added to engines."""

    arguments: tuple[Flag, ...] = ()
    variables: tuple[Flag, ...] = ()
    prefill_python: str | None = None
    """The interpreter whose vLLM P is; None for that of the other engines."""

    def argv(self, role: Role) -> list[str]:
        """Return the arguments for an engine of a role."""
        return list(_of(self.arguments, role))

    def env(self, role: Role) -> dict[str, str]:
        """Return the variables for an engine of a role."""
        return dict(_split(text) for text in _of(self.variables, role))

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the command line that gave them, in one word each and without secrets."""
        named = (("--engine-arg", self.arguments), ("--engine-env", self.variables))
        words = [f"{option}={f.role + ':' if f.role else ''}{f.text}" for option, flags in named for f in flags]
        if self.prefill_python is not None:
            words.append(f"--prefill-python={self.prefill_python}")
        return redact.words(words)

    def require_free(self, role: Role, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Raise UsageError for a flag that the harness sets for this engine itself."""
        settings = {_DEVICES, *map(setting_of, argv)}
        for text in self.argv(role):
            # vLLM takes --NAME.KEY for a key of an argument that is a mapping.
            name = _in_full(text.partition("=")[0].partition(".")[0].replace("_", "-"), argv)
            setting = setting_of(name)
            if setting is not None and setting in settings:
                own = for_p(setting, OnPrefill.model_fields) if role == "prefill" else None
                raise UsageError(
                    f"--engine-arg {text}: the harness sets this argument of the {role} engine from the profile; "
                    f"use {setting} there" + (f", or {own} for P alone" if own else "")
                )
            if name in argv:
                raise UsageError(
                    f"--engine-arg {text}: the harness sets this argument of the {role} engine itself; leave it out, "
                    "or change engine.extra_args of the profile if it is there"
                )
        for name in self.env(role):
            if name in env:
                raise UsageError(
                    f"--engine-env {name}: the harness sets {name}={env[name]} for the {role} engine; leave it out, "
                    "or change the profile (engine.env)"
                )

    def require_engines(self, roles: Collection[Role]) -> None:
        """Raise UsageError for a flag of a role that no engine has: nothing would be under test."""
        if self.prefill_python is not None and "prefill" not in roles:
            raise UsageError(
                f"--prefill-python {self.prefill_python}: none of the chosen cells has a P; choose cells with --cell "
                "'pd-*', or give --engine-python"
            )
        for flag in (*self.arguments, *self.variables):
            if flag.role is not None and flag.role not in roles:
                raise UsageError(
                    f"{flag.role}:{redact.words([flag.text])[0]}: the chosen cells have no {flag.role} engine, only "
                    f"{' and '.join(sorted(roles))}; D answers the single cells of a pair's method"
                )


def _in_full(name: str, argv: Sequence[str]) -> str:
    """Return the argument that the harness sets and of which a name is the beginning: vLLM's parser takes it for that.
    Return the name itself if there is none."""
    known = [*argv, *SETTINGS, *(a.replace("--", "--no-", 1) for a in SETTINGS)]
    return name if name in known else next((a for a in known if a.startswith(name)), name)


NO_FLAGS = EngineFlags()


def parse_flags(arguments: Sequence[str], variables: Sequence[str], prefill_python: str | None = None) -> EngineFlags:
    """Return what ``--engine-arg``, ``--engine-env`` and ``--prefill-python`` ask for. Raises UsageError for arguments
    and variables that are neither."""
    return EngineFlags(
        prefill_python=prefill_python,
        arguments=tuple(_flag("--engine-arg", text, _ARGUMENT, "--NAME or --NAME=VALUE") for text in arguments),
        variables=tuple(_flag("--engine-env", text, _VARIABLE, "NAME=VALUE") for text in variables),
    )


def require_same_flags(recorded: Sequence[str], given: EngineFlags, run: str) -> None:
    """Raise UsageError when a run is tried again without the flags that it was recorded with, or with others.

    They are not taken from the record: it may be somebody else's, and an argument can run code.
    """
    if tuple(recorded) != given.options:
        raise UsageError(
            f"{run} was recorded with {_shown(recorded)}, not with {_shown(given.options)}; give the same, if you "
            "would have given them yourself"
        )


def role_of(option: str) -> str | None:
    """Return the role of the engines that an option of ``EngineFlags.options`` adds to; None if it adds to all."""
    name, _, text = option.partition("=")
    prefixed = _PREFIX.fullmatch(text)
    return "prefill" if name == "--prefill-python" else prefixed[1] if prefixed else None


def _shown(options: Sequence[str]) -> str:
    return shlex.join(options) if options else "none of --engine-arg, --engine-env and --prefill-python"


def _flag(option: str, text: str, shape: re.Pattern[str], what: str) -> Flag:
    prefixed = _PREFIX.fullmatch(text)
    role, rest = (prefixed[1], prefixed[2]) if prefixed else (None, text)
    if not shape.fullmatch(rest):
        raise UsageError(
            f"{option} {text!r}: expected {what}; for some of the engines, with one of "
            f"{', '.join(f'{r}:' for r in _ROLES)} before it"
        )
    return Flag.model_validate({"role": role, "text": rest})


def _of(flags: Sequence[Flag], role: Role) -> Iterator[str]:
    return (f.text for f in flags if f.role in (None, role))


def _split(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value
