"""Bytes over the laptop's link, and seconds, of a copy to several hosts:

.venv/bin/python tests/bench/hosts/copies.py --mib 1024 --hosts 3 --json

A bed of hosts of its own: real ones, each with a systemd, an sshd and a disk, on this machine's bridge (root). Bytes are those that this
machine itself put on the bridge, by the kernel's count: what hosts send each other only passes it. In turn:

spread    `lockstep cp` to all hosts, as it is typed
each      `lockstep cp --node N` to every host at once: the laptop sends to each

--mbit limits what this machine sends, as a laptop's network does; --files N copies so many small files besides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from lockstep.devcluster.hosts.bed import up  # noqa: E402
from support.clusters.bed_hosts import BedHosts  # noqa: E402
from support.clusters.own_cluster import own_bed  # noqa: E402

PIECE = 16 << 20
SMALL_BYTES = 4096
LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))


def make(folder: Path, mib: int, files: int) -> int:
    """Write the files, and return their bytes."""
    folder.mkdir()
    with (folder / "weights").open("wb") as file:
        for start in range(0, mib << 20, PIECE):
            file.write(os.urandom(min(PIECE, (mib << 20) - start)))
    for number in range(files):
        (folder / f"{number}.json").write_bytes(os.urandom(SMALL_BYTES))
    return (mib << 20) + files * SMALL_BYTES


def measure(bed: BedHosts, source: Path, size: int, target: str, commands: list[list[str]]) -> dict[str, Any]:
    """Run the commands at once, and check that all hosts have the files."""
    counter = Path(f"/sys/class/net/{bed.layout.bridge}/statistics/tx_bytes")
    before, begun = int(counter.read_text()), time.monotonic()
    words = ["cp", str(source), f"bench:/workspace/{target}/", "--cluster", str(bed.layout.cluster_file)]
    running = [subprocess.Popen([LOCKSTEP, *words, *more], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL) for more in commands]
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"{' '.join(words)} failed")
    seconds, sent = time.monotonic() - begun, int(counter.read_text()) - before
    script = 'cd "$1" && find . -type f | sort | xargs sha256sum | sha256sum'
    digests = {
        bed.console(number, "sh", "-c", script, "sh", f"/home/ada/lockstep/workspace/{target}/{source.name}") for number in range(bed.count)
    }
    own = subprocess.run(["sh", "-c", script, "sh", str(source)], capture_output=True, text=True, check=True).stdout
    if digests != {own}:
        sys.exit("not every host has what was sent")
    for number in range(bed.count):  # (a gibibyte a host and way)
        bed.console(number, "rm", "-r", f"/home/ada/lockstep/workspace/{target}")
    return {"sentBytes": sent, "sentPerByte": round(sent / size, 3), "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the large file (default: 1024)")
    parser.add_argument("--files", type=int, default=0, help="small files besides (default: 0)")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=0, help="limit of what this machine sends, Mb/s (default: none)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    try:
        with own_bed() as layout:
            up(layout, options.hosts, lambda line: print(line, file=sys.stderr))
            if options.mbit:
                limit = ["tbf", "rate", f"{options.mbit}mbit", "burst", "256k", "latency", "100ms"]
                subprocess.run(["tc", "qdisc", "replace", "dev", layout.bridge, "root", *limit], check=True)
            bed = BedHosts(layout, options.hosts)
            size = make(folder / "model", options.mib, options.files)
            result: dict[str, Any] = {"bytes": size, "hosts": options.hosts, "mbit": options.mbit or None}
            result["spread"] = measure(bed, folder / "model", size, "spread", [[]])
            result["each"] = measure(bed, folder / "model", size, "each", [["--node", str(number)] for number in range(options.hosts)])
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(result))
        return
    for way in ("spread", "each"):
        one = result[way]
        print(f"{way:6} {one['sentBytes'] / 2**30:.3f} GiB over the link, {one['sentPerByte']:.3f} a byte, {one['seconds']:.1f} s")


if __name__ == "__main__":
    main()
