"""Facts about a node's network: ports with their addresses and line rates, RDMA devices and GPUs, each with its place on the PCI bus.

Imported by the network program, and sent with it.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

from lockstep_spec.kernel import file_words, folder_names, gigabits, rdma_ports, usable_cores

PORTS_MAX, GPUS_MAX, TEXT_MAX = 64, 64, 200
SIOCGIFADDR, SIOCGIFNETMASK, SIOCGIFMTU, SIOCETHTOOL, GET_DRIVER = 0x8915, 0x891B, 0x8921, 0x8946, 0x3
SPEEDLESS_DRIVERS = frozenset({"veth", "tun", "bridge", "dummy", "tunnel", "vxlan", "wireguard", ""})
"""Drivers without a line rate: veth calls itself 10 Gb/s whatever it is laid over."""
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
Json = dict[str, Any]


def network_facts(root: Path = Path("/")) -> Json:
    """Ports with an address, RDMA devices and GPUs of this node, each with its place on the PCI bus."""
    return {
        "host": socket.gethostname()[:TEXT_MAX],
        "cores": usable_cores(root),
        "ports": [port for _, name in socket.if_nameindex() if name != "lo" for port in [_port(root, name)] if port][:PORTS_MAX],
        "hcas": _hcas(root)[:PORTS_MAX],
        "gpus": _gpus(root)[:GPUS_MAX],
        "links": gpu_links_in(_output("nvidia-smi", "topo", "-m")),  # [] without the tool or for one GPU
        "tools": [tool for tool in ("ib_write_bw",) if shutil.which(tool)],
    }


def _port(root: Path, name: str) -> Json | None:
    """One network interface; None without an address."""
    address, prefix = _address(name)
    if not address:
        return None
    folder = root / "sys/class/net" / name
    driver = _driver(name)
    speed = _number(file_words(folder / "speed"))
    known = speed is not None and speed > 0 and driver not in SPEEDLESS_DRIVERS
    return {
        "name": name,
        "address": address,
        "prefix": prefix,
        "mtu": struct.unpack_from("i", _interface_word(name, SIOCGIFMTU), 0)[0],
        "gbs": speed / 1000 if known and speed is not None else None,
        "driver": driver,
        "wireless": (folder / "wireless").exists() or (folder / "phy80211").exists(),
        "hca": next(iter(folder_names(folder / "device/infiniband")), ""),
        **_bus(folder / "device"),
    }


def _hcas(root: Path) -> list[Json]:
    """Ports of RDMA devices that are up and may be opened here."""
    ports = []
    for port in rdma_ports(root):
        if port.state == "ACTIVE" and port.openable:
            bus = _bus(port.folder.parents[1] / "device")
            ports.append({"device": port.device, "port": port.port, "gbs": gigabits(port.rate), "layer": port.link_layer, **bus})
    return ports


def _bus(device: Path) -> Json:
    """PCI addresses from the root complex down to the device, and its NUMA node; nothing of a device that is on no PCI bus."""
    path = os.path.realpath(device)
    numa = _number(file_words(Path(path, "numa_node")))
    return {"bus": PCI_ADDRESS.findall(path)[-12:], "numa": numa if numa is not None and numa >= 0 else None}


def _gpus(root: Path) -> list[Json]:
    """GPUs in the order of nvidia-smi; without it, as the driver lists them."""
    rows = [line.split(",") for line in _output("nvidia-smi", "--query-gpu=index,pci.bus_id,name", "--format=csv,noheader").splitlines()]
    named = [(row[1].strip().lower(), row[2].strip()) for row in rows if len(row) == 3]
    named = named or [(name, "GPU") for name in folder_names(root / "proc/driver/nvidia/gpus")]
    gpus = []
    for index, (address, name) in enumerate(named):
        short = address[-12:]  # (nvidia-smi writes the domain with eight digits)
        gpus.append({"index": index, "name": name[:TEXT_MAX], **_bus(root / "sys/bus/pci/devices" / short)})
    return gpus


def gpu_links_in(text: str) -> list[str]:
    """Words between GPUs in the matrix that nvidia-smi prints."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    header = next((line.split() for line in lines if line.split()[:1] == ["GPU0"]), [])
    count = sum(1 for word in header if re.fullmatch(r"GPU\d+", word))
    rows = [line.split()[1 : count + 1] for line in lines if re.match(r"GPU\d+\s", line) and line.split()[1:2] != ["GPU1"]]
    return sorted({word for row in rows for word in row if word != "X" and re.fullmatch(r"[A-Z]+\d*", word)})


def _address(name: str) -> tuple[str, int]:
    """IPv4 address and length of its network's prefix, else a global IPv6 address; ('', 0) where there is none."""
    try:
        address, mask = (_interface_word(name, request)[4:8] for request in (SIOCGIFADDR, SIOCGIFNETMASK))
        return socket.inet_ntoa(address), bin(int.from_bytes(mask, "big")).count("1")
    except OSError:
        pass
    for line in file_words(Path("/proc/net/if_inet6")).splitlines():
        words = line.split()
        if len(words) == 6 and words[5] == name and words[3] == "00":
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])), int(words[2], 16)
    return "", 0


def _interface_word(name: str, request: int) -> bytes:
    """Answer of the kernel about an interface, behind its name. Raises OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer: bytes = fcntl.ioctl(asking.fileno(), request, struct.pack("256s", name.encode()[:15]))
    return answer[16:]


def _driver(name: str) -> str:
    """Name of the interface's driver, as ethtool has it; '' where it has none."""
    data = array.array("B", struct.pack("I", GET_DRIVER) + bytes(192))
    request = struct.pack("16sP", name.encode()[:15], data.buffer_info()[0]) + bytes(16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            fcntl.ioctl(asking.fileno(), SIOCETHTOOL, request)
        except OSError:
            return ""
    return data.tobytes()[4:36].split(b"\0")[0].decode(errors="replace")


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else None
