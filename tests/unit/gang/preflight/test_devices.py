"""What a node sees of its devices, in made-up trees of /sys, /proc and /dev."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep_gang.agent.preflight.facts import compared_variables, gpu_facts, has_net_plugin, rdma_facts
from lockstep_gang.contract.preflight import ExpectedRdma, GpuFacts, HcaFacts

GID = "0000:0000:0000:0000:0000:ffff:0a00:0105"
NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Tue Aug  5 2026\nGCC version:  gcc version 12.3.0\n"


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def hca(root: Path, device: str, **changes: str) -> None:
    """One device with one port, as an active RoCE NIC has it."""
    port = f"sys/class/infiniband/{device}/ports/1"
    files = {"state": "4: ACTIVE", "link_layer": "Ethernet", "rate": "400 Gb/sec (4X NDR)", "gids/3": GID, "gid_attrs/types/3": "RoCE v2"}
    write(root, **{f"{port}/{name}": text for name, text in (files | changes).items()})
    write(root, **{f"sys/class/infiniband/{device}/device/infiniband_verbs/uverbs{device[-1]}/ibdev": device})
    write(root, **{f"dev/infiniband/uverbs{device[-1]}": ""})


def test_a_port_is_read_with_the_gid_that_the_profile_names(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0")
    facts = rdma_facts(ExpectedRdma(gid_index=3), tmp_path)
    assert facts.hcas == (HcaFacts("mlx5_0", 1, "ACTIVE", "Ethernet", "400 Gb/sec (4X NDR)", GID, "RoCE v2", (3,)),)
    assert facts.unusable == ()


def test_an_empty_slot_of_the_gid_table_is_no_gid(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0", **{"gids/3": "0000:0000:0000:0000:0000:0000:0000:0000"})
    assert rdma_facts(ExpectedRdma(gid_index=3), tmp_path).hcas[0].gid == ""
    assert rdma_facts(ExpectedRdma(gid_index=7), tmp_path).hcas[0].gid == ""


def test_a_device_without_its_character_device_can_t_be_used(tmp_path: Path) -> None:
    hca(tmp_path, "mlx5_0")
    hca(tmp_path, "mlx5_1")
    (tmp_path / "dev/infiniband/uverbs1").unlink()
    assert rdma_facts(ExpectedRdma(), tmp_path).unusable == ("mlx5_1",)


@pytest.mark.parametrize(("effective", "has"), [("0000000000000000", False), ("0000000000004000", True), ("00000000a80425fb", False)])
def test_ipc_lock_is_one_bit_of_the_effective_capabilities(tmp_path: Path, effective: str, has: bool) -> None:
    write(tmp_path, **{"proc/self/status": f"Name:\tpython3\nCapPrm:\tffffffffffffffff\nCapEff:\t{effective}"})
    assert rdma_facts(ExpectedRdma(), tmp_path).has_ipc_lock is has


def test_the_mtu_is_read_of_the_profile_s_interfaces_that_are_there(tmp_path: Path) -> None:
    write(tmp_path, **{"sys/class/net/net1/mtu": "1500", "sys/class/net/eth0/mtu": "1450"})
    assert rdma_facts(ExpectedRdma(interfaces=("net1", "net2")), tmp_path).mtus == {"net1": 1500}


def test_gpus_are_counted_by_the_devices_that_the_container_has(tmp_path: Path) -> None:
    write(tmp_path, **{f"dev/{name}": "" for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm")})
    write(tmp_path, **{"proc/driver/nvidia/version": NVRM})
    assert gpu_facts(tmp_path) == GpuFacts(2, "580.65.06")


def test_a_machine_without_devices_has_none(tmp_path: Path) -> None:
    assert gpu_facts(tmp_path) == GpuFacts(0, "")
    assert rdma_facts(ExpectedRdma(), tmp_path).hcas == ()


def test_of_a_variable_s_value_300_characters_are_compared() -> None:
    assert compared_variables({"NCCL_DEBUG": "x" * 5000}) == {"NCCL_DEBUG": "x" * 300}


@pytest.mark.parametrize(
    ("files", "variables", "finds"),
    [
        ({}, {}, False),
        ({"etc/ld.so.cache": "libnccl.so.2 /usr/lib/libnccl.so.2", "usr/lib/libnccl.so.2": ""}, {}, False),
        ({"etc/ld.so.cache": "libnccl-net.so /opt/amazon/ofi-nccl/lib/libnccl-net.so"}, {}, True),
        ({"opt/ofi/lib/libnccl-net-ofi.so": ""}, {}, False),
        ({"opt/ofi/lib/libnccl-net-ofi.so": ""}, {"LD_LIBRARY_PATH": "/x::/opt/ofi/lib"}, True),
        ({"usr/lib/libnccl-net.so.0": ""}, {}, True),
    ],
)
def test_a_network_plugin_is_found_where_the_linker_looks(
    tmp_path: Path, files: dict[str, str], variables: dict[str, str], finds: bool
) -> None:
    write(tmp_path, **files)
    assert has_net_plugin(variables, tmp_path) is finds
