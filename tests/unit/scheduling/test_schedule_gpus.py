"""GPUs as nvidia-smi prints them, and as CUDA_VISIBLE_DEVICES leaves them."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from harness.scheduling.gpus import QUERY, Gpu, query_gpus, used_gib, visible_devices, wait_given_back

FOUR = [Gpu(i, f"GPU-{c}1b2c3d4-0000", "H100", 80.0, 0.5, "580.1") for i, c in enumerate("abcd")]
MIG = [Gpu(0, f"MIG-{c}0", "H100 MIG 3g.40gb", 37.25, None, "580.1") for c in "xy"]

CSV = """0, GPU-aaa, NVIDIA H200, 143771, 4, 580.95.05
1, GPU-bbb, NVIDIA H200, 143771, [N/A], 580.95.05
"""
LISTING = """GPU 0: NVIDIA H200 (UUID: GPU-aaa)
  MIG 3g.71gb     Device  0: (UUID: MIG-111)
  MIG 1c.3g.71gb  Device  1: (UUID: MIG-222)
GPU 1: NVIDIA H200 (UUID: GPU-bbb)
"""


def nvidia_smi(csv, listing=""):
    return lambda command: csv if command[1] == f"--query-gpu={QUERY}" else listing


def names(setting, found=FOUR, **more):
    return [d.visible_as for d in visible_devices(setting, found, **more).devices]


def test_gpus_are_read():
    first, second = query_gpus(nvidia_smi(CSV))
    assert first == Gpu(0, "GPU-aaa", "NVIDIA H200", 143771 / 1024, 4 / 1024, "580.95.05")
    assert (second.used_gib, second.memory_gib) == (None, 143771 / 1024)


def test_instances_are_read_and_stand_for_their_gpu():
    found = query_gpus(nvidia_smi(CSV, LISTING))
    assert [(g.index, g.uuid) for g in found if g.is_instance] == [(0, "MIG-111"), (0, "MIG-222")]
    assert all(66 < g.memory_gib < 71 for g in found if g.is_instance)
    assert names(None, found) == ["1", "MIG-111", "MIG-222"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "No devices were found\n",
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "0, GPU-aaa, NVIDIA GB10, [N/A], [N/A], 580\n",
        "x, GPU-aaa, NVIDIA H200, 1, 1, 580\n",
        "0, GPU-aaa\n",
    ],
)
def test_what_cannot_be_read_is_no_gpu(text):
    assert query_gpus(nvidia_smi(text)) == []


def test_without_nvidia_smi_there_is_no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert query_gpus() == []


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("nvidia-smi", 20), PermissionError()])
def test_an_nvidia_smi_that_hangs_or_may_not_be_run_is_none(monkeypatch, error):
    def fail(*args, **more):
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert query_gpus() == []


def test_a_failing_nvidia_smi_is_none(monkeypatch):
    failed = subprocess.CompletedProcess([], 9, stdout=CSV, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: failed)
    assert query_gpus() == []


def test_all_gpus_without_a_setting():
    found = visible_devices(None, FOUR, node="gpu-7")
    assert [(d.visible_as, d.device.id, d.device.index) for d in found.devices] == [
        (str(i), f"gpu-7/{i}", i) for i in range(4)
    ]
    assert {d.device.node for d in found.devices} == {"gpu-7"}
    assert found.notes == ()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("2,0", ["2", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("GPU-b,GPU-a1b2", ["GPU-b1b2c3d4-0000", "GPU-a1b2c3d4-0000"]),
        ("", []),
        (" ", []),
    ],
)
def test_settings_that_say_what_they_mean(setting, expected):
    found = visible_devices(setting, FOUR)
    assert [d.visible_as for d in found.devices] == expected
    assert found.notes == ()


@pytest.mark.parametrize(
    ("setting", "expected", "said"),
    [
        ("0,-1,1", ["0"], "the end of the list"),
        ("-1", [], "the end of the list"),
        ("1,7,2", ["1"], "no GPU with that index (found 0, 1, 2, 3)"),
        ("0,,1", ["0"], "an empty entry"),
        ("none", [], "no GPU with that name"),
        ("GPU-a,1", ["GPU-a1b2c3d4-0000"], "a different kind than GPU-a"),
        ("GPU-", [], "no GPU with that name"),
        ("GPU-zz", [], "no GPU with that name"),
        ("MIG-zz", [], "no GPU with that name"),
        ("0,1,0", [], "a second time"),
        ("GPU-a,GPU-a1", [], "a second time"),
    ],
)
def test_lists_end_where_cuda_ends_them_and_that_is_said(setting, expected, said):
    found = visible_devices(setting, FOUR)
    assert [d.visible_as for d in found.devices] == expected
    assert len(found.notes) == 1 and said in found.notes[0]
    assert setting in found.notes[0]


def test_ambiguous_prefix_is_refused():
    found = visible_devices("GPU-a1", [FOUR[0], replace(FOUR[0], index=1, uuid="GPU-a1ffffff-0000")])
    assert found.devices == () and "2 GPUs whose UUID begins like that" in found.notes[0]


def test_instances_by_name():
    found = visible_devices("MIG-y0,MIG-x0", [*FOUR, *MIG])
    assert [d.visible_as for d in found.devices] == ["MIG-y0", "MIG-x0"]
    assert found.devices[0].device.memory_gib == 37.25 and "only one instance" in found.notes[0]


def test_indices_on_a_mixed_machine_are_questioned():
    mixed = [FOUR[0], replace(FOUR[1], name="A10")]
    assert "PCI_BUS_ID" in visible_devices("0", mixed).notes[0]
    assert visible_devices("0", mixed, device_order="PCI_BUS_ID").notes == ()
    assert visible_devices("GPU-a", mixed).notes == ()


def test_used_memory_is_that_of_the_device():
    visible = visible_devices(None, query_gpus(nvidia_smi(CSV)))
    later = CSV.replace(" 4,", " 1024,")
    assert [used_gib(d, nvidia_smi(later)) for d in visible.devices] == [1.0, None]
    assert used_gib(visible.devices[0], nvidia_smi(None)) is None


class Slow:
    """A device whose use falls with each look, and a clock that only sleeping moves."""

    def __init__(self, *figures):
        self.figures = list(figures)
        self.now = 0.0

    def query(self, device):
        return self.figures.pop(0) if len(self.figures) > 1 else self.figures[0]

    def sleep(self, seconds):
        self.now += seconds

    def wait(self, **more):
        device = visible_devices("0", FOUR).devices[0]
        return wait_given_back(device, 0.5, query=self.query, clock=lambda: self.now, sleep=self.sleep, **more)


def test_memory_that_comes_back_is_waited_for():
    slow = Slow(30.0, None, 12.0, 0.9)
    assert (slow.wait(), slow.now) == ("", 1.5)


@pytest.mark.parametrize(("figure", "said"), [(30.0, "30.0 GiB"), (1.1, "1.1 GiB"), (None, "no figure")])
def test_memory_that_stays_is_said(figure, said):
    slow = Slow(figure)
    reason = slow.wait(timeout_s=3.0)
    assert slow.now == 3.0
    assert said in reason and "at most 1.0 GiB" in reason
