"""What connects GPUs, as nvidia-smi shows it."""

from __future__ import annotations

import pytest

from harness.scheduling.links import UNKNOWN, between, query_links, summary

TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tNODE\t0-31\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
LINKS = query_links(lambda _: TOPOLOGY)


def test_each_two_gpus_have_a_link():
    assert {
        frozenset((0, 1)): "NVLink (NV18)",
        frozenset((0, 2)): "host (SYS)",
        frozenset((1, 2)): "PCIe (PHB)",
    } == LINKS
    assert summary(LINKS) == ("NVLink (NV18) between 1, PCIe (PHB) between 1, host (SYS) between 1 of 3 pairs of GPUs")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([0], [1], "NVLink (NV18)"),
        ([0], [0], "one GPU"),
        ([0, 1], [2], "PCIe (PHB) and host (SYS)"),
        ([0, 1], [1], "NVLink (NV18) and one GPU"),
        ([0], [7], UNKNOWN),
    ],
)
def test_link_of_a_pair_in_words(first, second, words):
    assert between(LINKS, first, second) == words


@pytest.mark.parametrize("text", [None, "", "GPU0\tGPU1\n", "No devices were found", "GPU0 X ??\n"])
def test_without_a_readable_topology_links_are_unknown(text):
    links = query_links(lambda _: text)
    assert between(links, [0], [1]) == UNKNOWN and summary(links) == UNKNOWN
