"""The compiler that Triton wants of a back end; nothing is compiled."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):  # type: ignore[misc]
    """Refuses to compile: a kernel that gets here was not interpreted."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise RuntimeError(
            "expected Triton to interpret kernels (TRITON_INTERPRET=1), found one to compile for the CPU"
        )

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> None:
        """Add nothing: there is nothing to compile to."""

    def load_dialects(self, context: Any) -> None:
        """Load nothing."""

    def get_module_map(self) -> dict[str, Any]:
        return {}
