"""What connects the GPUs of this machine: the way that KV takes from P to D."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from harness.scheduling.gpus import Ask, ask_program

UNKNOWN = "unknown"
Links = Mapping[frozenset[int], str]
"""The link of each two GPUs as text, by their indices."""
_PCIE = ("PIX", "PXB", "PHB")
_HOST = ("NODE", "SYS")


def query_links(ask: Ask = ask_program) -> Links:
    """Return the links that ``nvidia-smi topo -m`` shows; empty without nvidia-smi, or when it cannot be read."""
    lines = [
        line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", ask(["nvidia-smi", "topo", "-m"]) or "").splitlines()
    ]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)]
    found: dict[frozenset[int], str] = {}
    for words in lines:
        if words is not header and words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, code in zip(columns, words[1:], strict=False):
                if column != row:
                    found[frozenset((row, column))] = _in_words(code)
    return found


def _in_words(code: str) -> str:
    if re.fullmatch(r"NV\d+", code):
        return f"NVLink ({code})"
    if code in _PCIE:
        return f"PCIe ({code})"
    return f"host ({code})" if code in _HOST else UNKNOWN


def between(links: Links, first: Sequence[int], second: Sequence[int]) -> str:
    """Return what connects two engines, given the indices of their GPUs: each kind of link once."""
    kinds = {"one GPU" if a == b else links.get(frozenset((a, b)), UNKNOWN) for a in first for b in second}
    return " and ".join(sorted(kinds)) or UNKNOWN


def summary(links: Links) -> str:
    """Return the kinds of links between any two GPUs with their number."""
    counted = [f"{kind} between {sum(k == kind for k in links.values())}" for kind in sorted(set(links.values()))]
    return f"{', '.join(counted)} of {len(links)} pairs of GPUs" if counted else UNKNOWN
