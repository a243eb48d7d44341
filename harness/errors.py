"""Every exception that this package raises on purpose.

    HarnessError                 a sentence for the user, which the command line prints without a traceback
    ├── UsageError               wrong command line, profile or data file           → exit 64
    │   ├── ProfileError         unknown key or method, wrong type, path not found
    │   ├── DataError            a prompt, baseline or probe file is damaged or in a different format
    │   └── NotARunError         a folder that is not a recorded run
    └── InfrastructureError      nothing can be concluded; the affected cells are UNKNOWN → exit 2
        ├── EnvironmentFault     a package, program or model that engines need is missing
        │   └── ModelUnavailableError  a model that a profile names is not on this machine
        ├── EngineStartError     an engine did not become ready
        │   └── MutantRefusedError  because the code that a mutant patches looks different in this vLLM
        ├── EngineDiedError      an engine ended while it was in use
        ├── StorageError         a record or report cannot be written
        └── HandoffError         the P/D hand-off broke (HTTP error, missing parameters)
            ├── RequestTimeoutError    no complete response in time
            └── FailedAnswerError      a response with another status than 200
                └── RefusedError       status 400: the engine would not take the request

Messages say what was expected, what was found, and what to do.
"""

from __future__ import annotations

from typing import Literal

from harness import redact

EXIT_PASS = 0
EXIT_REGRESSION = 1
EXIT_UNKNOWN = 2
EXIT_IMPROVED = 3
EXIT_SUSPECT = 4
EXIT_USAGE = 64


class HarnessError(Exception):
    """Base class of all expected failures.

    Messages quote logs, responses and commands, and end up on terminals and in records, so secrets are redacted here.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact.text(a) if isinstance(a, str) else a for a in args))

    exit_code = EXIT_UNKNOWN


class UsageError(HarnessError):
    exit_code = EXIT_USAGE


class ProfileError(UsageError):
    pass


class DataError(UsageError):
    pass


class NotARunError(UsageError):
    pass


class InfrastructureError(HarnessError):
    exit_code = EXIT_UNKNOWN


class EnvironmentFault(InfrastructureError):
    pass


class ModelUnavailableError(EnvironmentFault):
    pass


class EngineStartError(InfrastructureError):
    pass


class MutantRefusedError(EngineStartError):
    def __init__(self, message: str, mutants: tuple[str, ...]) -> None:
        super().__init__(message)
        self.mutants = mutants
        """Ids of the mutants that refused."""


class EngineDiedError(InfrastructureError):
    def __init__(self, message: str, code: int | None = None, words: str = "") -> None:
        super().__init__(message)
        self.code = code
        """The exit code of its process, negative for a signal; None where that is not known."""
        self.words = words
        """The exception that it logged; empty if it logged none."""


class StorageError(InfrastructureError):
    pass


class HandoffError(InfrastructureError):
    pass


class RequestTimeoutError(HandoffError):
    pass


class FailedAnswerError(HandoffError):
    def __init__(self, message: str, role: Literal["single", "prefill", "decode"], status: int, words: str) -> None:
        super().__init__(message)
        self.role = role
        """Role in which the engine was asked."""
        self.status = status
        self.words = redact.text(words)
        """The body of the response, of which only the beginning is kept."""


class RefusedError(FailedAnswerError):
    """An engine would not take a request as it was sent: nothing was computed for it."""


class AbandonedError(HandoffError):
    """The client gave up a request, as a scenario has it."""
