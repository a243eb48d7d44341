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
            └── RequestTimeoutError    no complete response in time

Messages say what was expected, what was found, and what to do.
"""

from __future__ import annotations

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
    pass


class StorageError(InfrastructureError):
    pass


class HandoffError(InfrastructureError):
    pass


class RefusedError(HandoffError):
    """An engine would not take a request as it was sent: nothing was computed for it."""


class RequestTimeoutError(HandoffError):
    pass


class AbandonedError(HandoffError):
    """The client gave up a request, as a scenario has it."""
