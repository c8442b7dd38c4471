"""Judgments of `doctor` about each host and about what hosts must have alike, each with what to do (pure). Those of the network are in
`reach`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address

from lockstep.api.errors import ConfigError
from lockstep.api.hosts import HostsCluster, login_words
from lockstep.api.job import TrainingJob
from lockstep.plan.cluster.finding import Finding, failed, note, warning
from lockstep.plan.discovery.rails import Hardware
from lockstep.plan.hosts.condition import GpuError, HostCondition, HostLook
from lockstep.plan.hosts.facts import DIVIDED, HostFacts, HostGpu, session_words
from lockstep.plan.hosts.keys import is_of_host_key
from lockstep.plan.hosts.needs import oldest_python, unmet_folders, unmet_python
from lockstep.plan.hosts.place import free_block, interface_words, python_of
from lockstep_machine.rdma import LOCKED_BYTES_ENOUGH, LOCKED_BYTES_FAILING
from lockstep_spec.cuda import has_kernels
from lockstep_spec.words import binary_size, decimal_size, listed

GIB = 1 << 30
LEAST_FREE, LITTLE_FREE = GIB, 20 * GIB
LEAST_SHM = GIB
OPEN_FILES = 8192
"""Fewer may not be enough for many ranks, data loaders and NCCL."""
CLOCK_SECONDS = 2.0
SLOW_SECONDS = 3.0
NOISE_SHOWN = 40
BFLOAT16 = (8, 0)
"""First compute capability with bf16."""
COMPARED = ("torch", "deepspeed", "transformers", "peft", "accelerate", "numpy", "safetensors", "lockstep-trainer")
"""Packages that ranks of all hosts must have alike."""
NEEDED = ("torch",)
NO_FAULTS = frozenset({14, 106, 107, 154})
"""Xids that are tests, or repeat what to do about another one. All numbers: NVIDIA's catalog of Xid errors
(docs.nvidia.com/deploy/xid-errors).
"""
PROGRAMS = frozenset({11, 13, 25, 31, 37, 43, 45, 69, 80, 137})
NVLINKS = frozenset({74, 108, 136, *range(144, 151), 155, 166, 170})
CARDS = frozenset({
    32, 46, 48, 54, *range(61, 65), 79, *range(92, 96), 109, 110, *range(119, 122), 140, 143, *range(156, 166), *range(167, 170), 171, 172,
})  # fmt: skip
XIDS = (
    (PROGRAMS, ", a program's",
        "the card is well: compute-sanitizer on that program finds the access; 45 alone is left by a program that was ended"),
    (NVLINKS, ", NVLink's",
        "nvidia-smi nvlink -e, and the log of nvidia-fabricmanager or nvidia-imex: the other end may be the cause; then reset the GPUs"),
    (CARDS, ", the card's",
        "nvidia-smi -q -d ECC,ROW_REMAPPER; power, heat and seating of the card come first; reset it, and replace it if that comes again"),
)  # fmt: skip
OTHER_XID = "look its number up in NVIDIA's catalog of Xid errors"


def host_findings(
    looks: Sequence[HostLook], cluster: HostsCluster, name: str, addresses: Mapping[str, str], job: TrainingJob | None = None
) -> list[Finding]:
    """Judge each host, and what all must have alike. `name`: of the cluster, as one types it. `addresses`: of hosts, where they are
    known. `job`: one that is to run there.
    """
    findings: list[Finding] = []
    for look in looks:
        if look.facts is None or look.condition is None:
            findings.append(_unreachable(look, name))
            continue
        facts, condition = look.facts, look.condition
        findings += [
            *_way(look),
            *_python(look, facts, condition, name, oldest_python(job)),
            *_disk(look, facts),
            *_gpus(look, facts, condition),
            *_address(look, facts, addresses.get(look.name, "")),
            *_keeping(look, facts, condition, name),
            *_limits(look, facts, condition),
        ]
    known = [look for look in looks if look.facts is not None]
    return [*findings, *_sshd(known), *_own_names(known), *_versions(known, name), *_unlike_gpus(known), *_ports(known, cluster)]


def hosts_hardware(looks: Sequence[HostLook]) -> Hardware:
    """Collect the hardware of hosts that a file may leave unused: RDMA needs two ends."""
    names = [look.name for look in looks if look.condition is not None and look.condition.has_rdma]
    return Hardware({"hosts": f"{listed(names)} have RDMA devices"} if len(names) > 1 else {})


def _unreachable(look: HostLook, name: str) -> Finding:
    message = look.problem.removeprefix(f"host {look.name} can't be reached: ")
    if is_of_host_key(message):
        return failed(
            look.name, message, f"lockstep hosts setup {name} shows the key's fingerprint, and pins the key once you have compared it"
        )
    if "doesn't let you in" in message:
        return failed(
            look.name,
            message,
            f"ssh-copy-id {login_words(look.name, user=look.host.user, port=look.host.port)}, or lockstep hosts setup {name} where it asks"
            " for a code or a passphrase",
        )
    words = login_words(look.name, user=look.host.user, port=look.host.port, jump=look.host.jump, identity=look.host.identity)
    return failed(look.name, message, f"ssh {words} must work in your terminal")


def _way(look: HostLook) -> Iterator[Finding]:
    if look.noise.strip():
        shown = look.noise.strip().splitlines()[0][:NOISE_SHOWN]
        yield warning(
            look.name,
            f"its login shell prints {shown!r} before any program runs",
            "let its ~/.bashrc (or the like) print nothing where nobody types: [[ $- == *i* ]] || return, as its first line",
        )
    if look.seconds > SLOW_SECONDS:
        fix = f"time ssh {look.name} true; look at its load, at its shell's startup files, and at sshd's UseDNS"
        yield warning(look.name, f"a program starts there only after {look.seconds:.1f} s", fix)
    if abs(look.clock_seconds) > CLOCK_SECONDS:
        way = "ahead of" if look.clock_seconds > 0 else "behind"
        fix = f"as root on {look.name}: timedatectl set-ntp true (or install chrony)"
        yield warning(look.name, f"its clock is {abs(look.clock_seconds):.0f} s {way} this machine's", fix)


def _python(look: HostLook, facts: HostFacts, condition: HostCondition, name: str, oldest: tuple[int, int]) -> Iterator[Finding]:
    unmet = [failed(look.name, *need) for need in unmet_python(look.host, facts, name, oldest)]
    yield from unmet
    if unmet:
        return
    python = python_of(look.host, facts)
    libraries = condition.libraries
    if libraries is None or libraries.problem:
        yield failed(
            look.name,
            f"the ranks' Python {python} doesn't work: {libraries.problem if libraries else 'it was not asked'}",
            f"correct hosts[].python; or leave it out, and lockstep hosts setup {name} makes an environment",
        )
        return
    lacking = [package for package in NEEDED if package not in libraries.packages]
    if lacking:
        fix = f"install it there; or leave hosts[].python out, and lockstep hosts setup {name} makes an environment"
        yield failed(look.name, f"the ranks' Python {python} has no {', '.join(lacking)}", fix)


def _disk(look: HostLook, facts: HostFacts) -> Iterator[Finding]:
    folder = facts.workspace
    yield from (failed(look.name, *need) for need in unmet_folders(facts, LEAST_FREE))
    if not folder.problem and LEAST_FREE <= folder.free < LITTLE_FREE:
        fix = "free some, or state a hosts[].workspace on another disk; -f job.yaml compares it with the job's checkpoints"
        yield warning(look.name, f"its workspace {folder.path} has {decimal_size(folder.free)} free", fix)


def _gpus(look: HostLook, facts: HostFacts, condition: HostCondition) -> Iterator[Finding]:
    if facts.gpu_problem:
        fix = f"nvidia-smi on {look.name}: where it fails, its driver needs a new start, or the card a reset"
        judged = failed if condition.nvidia_cards or facts.gpus else warning
        yield judged(look.name, f"its GPUs are not all known: {facts.gpu_problem}", fix)
    elif not facts.gpus and condition.nvidia_cards:
        fix = f"as root on {look.name}: install NVIDIA's driver, with nvidia-smi"
        yield failed(look.name, f"it has {condition.nvidia_cards} NVIDIA card(s), but nvidia-smi shows none", fix)
    if isinstance(look.host.gpus, list):
        present = {str(gpu.index) for gpu in facts.gpus} | {gpu.uuid for gpu in facts.gpus}
        missing = [gpu for gpu in look.host.gpus if gpu not in present]
        if missing:
            has = ", ".join(str(gpu.index) for gpu in facts.gpus) or "none"
            yield failed(look.name, f"the file names GPU {', '.join(missing)}, and the host has {has}", "correct hosts[].gpus")
    for gpu in facts.gpus:
        if gpu.taken:
            fix = f"wait for {'that job, stop it' if gpu.claim else 'them, end them'}, or leave the GPU out of hosts[].gpus"
            yield warning(look.name, f"GPU {gpu.index} ({gpu.name}) {gpu.taken}", fix)
        if gpu.ecc_errors:
            fix = f"nvidia-smi -q -d ECC on {look.name}; reset or replace the card"
            yield warning(look.name, f"GPU {gpu.index} ({gpu.name}) has {gpu.ecc_errors} memory errors that ECC could not correct", fix)
        if gpu.divided:
            fix = f"as root on {look.name}: nvidia-smi -i {gpu.index} -mig 0, or leave the GPU out of hosts[].gpus"
            words = f"is {DIVIDED}: a rank gets one slice, and NCCL joins no slices of one GPU"
            yield warning(look.name, f"GPU {gpu.index} ({gpu.name}) {words}", fix)
    if condition.gpu_errors is None and (facts.gpus or condition.nvidia_cards):
        fix = f"as root on {look.name}: usermod -aG adm {facts.user}, or sysctl kernel.dmesg_restrict=0"
        yield note(look.name, f"whether its GPUs had errors (Xid) is not known: {facts.user} may not read the kernel's log", fix)
    yield from _gpu_errors(look, facts.gpus, condition.gpu_errors or ())
    yield from _torch(look, facts.gpus, condition)


def _gpu_errors(look: HostLook, gpus: Sequence[HostGpu], errors: Sequence[GpuError]) -> Iterator[Finding]:
    """Say of each GPU its first error, or that of its hardware where a program's came before: what follows is a consequence."""
    names = {gpu.bus.lower()[-12:-2]: f"GPU {gpu.index} ({gpu.name})" for gpu in gpus}
    for bus in dict.fromkeys(error.bus for error in errors):
        mine = [error for error in errors if error.bus == bus and error.number not in NO_FAULTS]
        if mine:
            first = next((error for error in mine if error.number not in PROGRAMS), mine[0])
            harmless = first.number in PROGRAMS or "Nonfatal" in first.text
            whose, fix = next(((whose, fix) for numbers, whose, fix in XIDS if first.number in numbers), ("", OTHER_XID))
            message = f"{names.get(bus, f'the GPU at {bus}')}: Xid {first.number}{whose}: {first.text}"
            yield (note if harmless else warning)(look.name, message, fix)


def _torch(look: HostLook, gpus: Sequence[HostGpu], condition: HostCondition) -> Iterator[Finding]:
    torch = condition.torch
    if not gpus or torch is None:
        return
    if torch.problem:
        yield failed(look.name, f"its torch can't be imported: {torch.problem}", "import torch in the ranks' Python there")
        return
    if not torch.cuda:
        yield failed(look.name, "its torch has no CUDA, so it can't use the GPUs", "install torch's CUDA build in the ranks' Python")
        return
    for gpu in gpus:
        if gpu.capability is not None and not has_kernels(gpu.capability, torch.architectures):
            message = (
                f"its torch has no code for GPU {gpu.index} ({gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}), only"
                f" {' '.join(torch.architectures)}"
            )
            yield failed(look.name, message, "install a build of torch for a CUDA that knows the card, on all hosts")


def _address(look: HostLook, facts: HostFacts, address: str) -> Iterator[Finding]:
    if not address:
        return
    if ip_address(address.partition("%")[0]).is_global:
        yield warning(
            look.name,
            f"its address {address} is public, and what ranks send is neither encrypted nor authenticated",
            "connect the hosts by WireGuard or Tailscale, and state those addresses in hosts[].address",
        )
    name = look.host.interface or next((way.interface for way in facts.routes.values() if way.interface), "")
    link = facts.links.get(name)
    if words := interface_words(look.host, facts):
        yield failed(look.name, words, "correct hosts[].interface")
    elif link is not None and not link.up:
        yield failed(look.name, f"its interface {name} is down", f"as root on {look.name}: ip link set {name} up")
    elif link is not None and link.wireless:
        fix = "use a cable, and state its address and hosts[].interface"
        yield warning(look.name, f"its interface {name} is wireless: slow, and other devices share it", fix)


def _sshd(looks: Sequence[HostLook]) -> Iterator[Finding]:
    """Warn of what sshd allows and Lockstep doesn't need, on any network: who reaches the host may guess."""
    conditions = {look.name: look.condition for look in looks if look.condition is not None}
    lets_root_in = [name for name, one in conditions.items() if one.root_login == "yes"]
    by_root = [look.name for look in looks if look.facts is not None and look.facts.user == "root"]
    for names, what, setting in (
        ([name for name, one in conditions.items() if one.passwords], "takes passwords", "PasswordAuthentication no"),
        ([name for name in lets_root_in if name not in by_root], "lets root in", "PermitRootLogin no"),
        ([name for name in lets_root_in if name in by_root], "lets root in by password", "PermitRootLogin prohibit-password"),
    ):
        if names:
            yield warning(", ".join(names), f"its sshd {what}", f"as root there, once your key works: {setting} in /etc/ssh/sshd_config")


def _own_names(looks: Sequence[HostLook]) -> Iterator[Finding]:
    by_address: dict[str, list[str]] = {}
    for look in looks:
        if look.facts is not None and look.facts.own_name.startswith("127.") and look.facts.own_name != "127.0.0.1":
            by_address.setdefault(look.facts.own_name, []).append(look.name)
    for address, names in by_address.items():
        yield note(
            ", ".join(names),
            f"a host's own name is {address} there, as installers write it: harmless, since ranks are told their interface",
        )


def _keeping(look: HostLook, facts: HostFacts, condition: HostCondition, name: str) -> Iterator[Finding]:
    why, step = session_words(facts)
    fix = f"{f'lockstep hosts setup {name} asks for it; else ' if facts.has_units else ''}as root on {look.name}: {step}"
    if why and facts.kills_processes:
        yield failed(look.name, why, fix)
    elif why:
        yield warning(look.name, f"a job does not come back after a reboot, since {why}", fix)
    if condition.sleeps:
        fix = f"as root on {look.name}: systemctl mask sleep.target suspend.target hibernate.target hybrid-sleep.target"
        yield warning(look.name, f"it falls asleep when {condition.sleeps}, and the job waits until it wakes", fix)
    if condition.discharging:
        yield warning(look.name, "it runs on its battery", "plug it in: GPUs are slow on a battery, and it will end")


def _limits(look: HostLook, facts: HostFacts, condition: HostCondition) -> Iterator[Finding]:
    root = f"as root on {look.name}:"
    if condition.has_rdma and 0 <= facts.memlock < LOCKED_BYTES_ENOUGH:
        judged, needs = (failed, "more") if facts.memlock <= LOCKED_BYTES_FAILING else (warning, "more for many ranks")
        fix = (
            f"{root} LimitMEMLOCK=infinity below [Service] in /etc/systemd/system/user@.service.d/memlock.conf, and '{facts.user} - memlock"
            " unlimited' in /etc/security/limits.d/memlock.conf; then log in anew"
        )
        yield judged(look.name, f"{facts.user} may lock {binary_size(facts.memlock)} of memory, and RDMA needs {needs}", fix)
    if condition.shm is not None and condition.shm < LEAST_SHM:
        fix = f"{root} mount -o remount,size=50% /dev/shm"
        yield warning(look.name, f"its shared memory has {binary_size(condition.shm)}: NCCL and data loaders need more", fix)
    if 0 <= condition.open_files < OPEN_FILES:
        fix = f"{root} '{facts.user} hard nofile 65536' in /etc/security/limits.d/nofile.conf; then log in anew"
        yield warning(look.name, f"{facts.user} may have {condition.open_files} files open at most", fix)


def _versions(looks: Sequence[HostLook], name: str) -> Iterator[Finding]:
    """Packages whose versions differ between hosts: the odd ones are named."""
    told = {
        look.name: {"Python": ".".join(libraries.python.split(".")[:2]), **libraries.packages}
        for look in looks
        if look.condition is not None
        and (libraries := look.condition.libraries) is not None
        and all(package in libraries.packages for package in NEEDED)  # (another finding names a Python without them)
    }
    for package in ("Python", *COMPARED):
        versions = {host: packages.get(package, "none") for host, packages in told.items()}
        usual, odd = _odd(versions)
        if odd:
            message = f"{package} {', '.join(sorted(set(odd.values())))}, and {usual} on the other hosts"
            yield failed(", ".join(odd), message, f"give all hosts the same packages: lockstep hosts setup {name}, without hosts[].python")


def _odd(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The value that most have (of the first, where there is a tie), and what the others have instead."""
    if not values:
        return "", {}
    counts = Counter(values.values())
    usual = max(counts, key=lambda value: counts[value])
    return usual, {host: value for host, value in values.items() if value != usual}


def _unlike_gpus(looks: Sequence[HostLook]) -> Iterator[Finding]:
    gpus = {look.name: look.facts.gpus for look in looks if look.facts is not None}
    without = [name for name, cards in gpus.items() if not cards]
    if without and any(gpus.values()):
        fix = "leave it out of a job that uses GPUs with --without, or use gpusPerNode: 0"
        yield warning(", ".join(without), "it has no GPU, and other hosts have some", fix)
    capable = {
        name: min(card.capability for card in cards if card.capability)
        for name, cards in gpus.items()
        if any(card.capability for card in cards)
    }
    old = [name for name, capability in capable.items() if capability < BFLOAT16]
    if old:
        yield note(", ".join(old), "a GPU there has no bf16: state precision: FP16 in jobs that use it")
    drivers = {name: ", ".join(sorted({card.driver for card in cards if card.driver})) for name, cards in gpus.items() if cards}
    usual, odd = _odd(drivers)
    if odd:
        words = "; ".join(f"{name} {version}" for name, version in odd.items())
        yield note(", ".join(odd), f"NVIDIA's driver differs: {words}; {usual} on the other hosts")


def _ports(looks: Sequence[HostLook], cluster: HostsCluster) -> Iterator[Finding]:
    facts = [look.facts for look in looks if look.facts is not None]
    try:
        free_block(cluster, facts)
    except ConfigError as error:
        yield failed("ports", str(error), "state other ports in the cluster file, or end what listens there")
