"""Which GPUs engines need, and which they get."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.engines.inventory import (
    WORKING_GIB,
    Inventory,
    describe,
    gpu_engine_gib,
    jobs_of,
    sharing_note,
    too_few_to_part,
)
from harness.profiles.axes import merged
from harness.profiles.engine_config import EngineConfig
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.scheduling.gpus import Gpu, Visible, VisibleDevice
from harness.scheduling.model import Device
from harness.scheduling.planning import simulate
from harness.workload.prepare import prepare


def gpus(count, gib=80.0):
    return Inventory(tuple(Device(f"gpu-{n}", "node", gib, n) for n in range(count)), {}, shared=True)


def jobs(prepared, inventory):
    return jobs_of(prepared.plan, prepared.works, prepared.profile, inventory, prepared.rescores)


def test_p_and_d_are_apart_where_there_are_two_gpus_and_share_one():
    prepared = prepare("gpu", ["pd-eagle3"], planned=True)
    for count, held in ((1, 1), (2, 2)):
        inventory = gpus(count)
        (slot,) = simulate(jobs(prepared, inventory), inventory.devices).slots
        assert len(slot.placement.devices) == held
    assert too_few_to_part(prepared.plan, prepared.profile, gpus(2)) == ()
    shared = too_few_to_part(prepared.plan, prepared.profile, gpus(1))
    assert shared == ("pd-eagle3",)
    assert "1 GPU are too few for P and D of pd-eagle3" in sharing_note(shared, 1)


def test_a_share_of_a_gpu_without_memory_is_not_enough_to_be_apart():
    profile = load_profile("gpu")
    cluster = Inventory((Device("n/GPU-0", "n", 1.0),), {}, shared=True, whole=True)
    assert cluster.need(profile, "prefill").gib == 1.0
    anywhere = Profile.model_validate(merged(profile.model_dump(), {"engine": {"placement": "any"}}))
    assert cluster.need(anywhere, "prefill").gib == pytest.approx(0.06)


def test_memory_is_weights_and_kv_where_these_are_more_than_the_share():
    profile = load_profile("gpu")
    wanted = gpu_engine_gib(profile, "decode")
    assert wanted is not None
    assert WORKING_GIB + 1 < wanted < WORKING_GIB + 1.1
    assert gpus(1, 80.0).need(profile, "decode").gib == pytest.approx(4.8)
    assert gpus(1, 12.0).need(profile, "decode").gib == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        ((), 2),
        (("--pipeline-parallel-size", "2"), 4),
        (("--pipeline_parallel_size=2", "--data-parallel-size", "3"), 12),
    ],
)
def test_every_kind_of_parallelism_counts(arguments, devices):
    engine = EngineConfig(device="gpu", tensor_parallel={"prefill": 2}, extra_args=arguments)
    assert engine.devices_of("prefill") == devices and engine.devices_of("decode") == devices / 2


def test_a_parallel_size_is_a_whole_number():
    with pytest.raises(ValidationError, match="expected a whole number above 0, found 'two'"):
        EngineConfig(device="gpu", extra_args=("--pipeline-parallel-size", "two"))


def test_the_log_names_the_link_of_a_pair():
    prepared = prepare("gpu", ["pd-eagle3"], planned=True)
    found = tuple(Gpu(n, f"GPU-{n}", "H100", 80.0, 0.0, "580.65") for n in range(2))
    seen = Visible(tuple(VisibleDevice(d, str(d.index), found[d.index]) for d in gpus(2).devices), ())
    names = {d.device.id: d.visible_as for d in seen.devices}
    inventory = gpus(2)._replace(gpus=seen.devices, names=names, links={frozenset((0, 1)): "NVLink (NV18)"})
    (slot,) = simulate(jobs(prepared, inventory), inventory.devices).slots
    assert describe(slot.placement, inventory).endswith("; link: NVLink (NV18)")
