"""`lockstep hosts setup` on hosts without a network: the environment comes from a folder of wheels at the laptop, whatever breaks
meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from lockstep.cli.clusters.demo import demo_folder
from lockstep.platforms.hosts import environment
from lockstep.platforms.onhost import install
from support.checkout import ROOT
from support.clusters import bed_hosts
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs
from support.clusters.small_wheels import installed_wheelhouse, make_wheelhouse, write_lock, write_wheel
from support.in_process import Told

HOSTS = 2
PACKAGES = {"small_alpha": "VALUE = 41\n", "small_beta": "from small_alpha import VALUE\nMORE = VALUE + 1\n"}
DATA = "/home/{user}/.local/share/lockstep"
SCRIPT = """\
import os, sys, time
import small_beta
path = os.path.expanduser("~/lockstep/workspace/environment")
open(path, "w").write(f"{sys.prefix} {small_beta.MORE}")
while os.path.exists(os.path.expanduser("~/lockstep/workspace/wait")):
    time.sleep(0.1)
"""
TREE = 'cd "$1" 2>/dev/null && find . -printf "%p %T@ %s %l\\n" | LC_ALL=C sort || true'


class Lab(BedJobs):
    """The laptop with a cluster file that states no Python, a lock of small packages and their wheels."""

    def __init__(self, bed: BedHosts, folder: Path, user: str = "ada", lock: Path | None = None, hosts: int = HOSTS) -> None:
        super().__init__(bed, folder)
        self.user = user
        self.house = folder / "wheels"
        self.lock = lock or make_wheelhouse(folder, PACKAGES)
        lines = [line for line in self.cluster.read_text().splitlines() if "python:" not in line]
        text = "\n".join(lines).replace("user: ada", f"user: {user}").partition(f"  - name: {bed.host(hosts).name}")[0]
        self.cluster.write_text(f"{text.rstrip()}\nenvironment: {{lock: {self.lock}, wheelhouse: {self.house}}}\n")

    def setup(self, *words: str, check: bool = True) -> Told:
        return self.type("hosts", "setup", str(self.cluster), *words, check=check)

    def sh(self, number: int, script: str) -> str:
        return self.bed.console(number, "sh", "-c", script, "sh", DATA.format(user=self.user)).strip()

    def tree(self, number: int) -> str:
        """Everything in the host's folder of environments, with times and sizes."""
        return self.sh(number, TREE)

    def environments(self, number: int) -> list[str]:
        return self.sh(number, 'ls -d "$1"/env-* 2>/dev/null || true').split()

    def interrupted(self, word: str) -> None:
        """Type it, and kill it when it says `word`: it gets to tidy nothing up."""
        command = [sys.executable, "-m", "lockstep.cli.main", "hosts", "setup", str(self.cluster)]
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = next((line for line in process.stdout if word in line), None)
            finally:
                process.send_signal(signal.SIGKILL)
        assert line is not None, f"it never said {word}"

    def works(self, number: int) -> bool:
        return (
            self.sh(number, 'runuser -u "$(stat -c %U "$1")" -- "$1/env/bin/python" -c "import small_beta; print(small_beta.MORE)"') == "42"
        )


def wipe(bed: BedHosts) -> None:
    for number in range(bed.count):
        bed.console(number, "sh", "-c", "rm -rf /home/*/.local/share/lockstep /home/*/lockstep")


@pytest.fixture
def bare(bed: BedHosts) -> Iterator[BedHosts]:
    """Hosts on which nothing was set up; they are left so."""
    wipe(bed)
    yield bed
    bed.mend()
    wipe(bed)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send only the top of Lockstep's packages to hosts, since each host compiles what it gets."""
    whole = environment.trainer_archive

    def top(version: str) -> bytes:
        written = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(whole(version))) as archive, zipfile.ZipFile(written, "w") as small:
            for entry in archive.infolist():
                if entry.filename.count("/") == 1:
                    small.writestr(entry, archive.read(entry))
        return written.getvalue()

    monkeypatch.setattr(environment, "trainer_archive", top)


@pytest.fixture
def lab(bare: BedHosts, tmp_path: Path, small: None) -> Lab:
    return Lab(bare, tmp_path)


def test_a_dry_run_shows_what_hosts_lack_and_changes_nothing(lab: Lab) -> None:
    shown = lab.setup("--dry-run").stdout
    assert re.search(r"^bed1: (?:x86_64|aarch64), Python 3\.\d+ its own", shown, re.MULTILINE)
    assert f"2 packages from {lab.house}" in shown
    assert [lab.tree(number) for number in range(HOSTS)] == ["", ""]
    assert lab.sh(0, "ls -d /home/ada/lockstep 2>/dev/null || true") == ""


def test_a_job_on_bare_hosts_is_refused_with_the_command_that_readies_them(lab: Lab) -> None:
    done = lab.run(lab.job("bare", nodes=HOSTS), check=False)
    assert done.returncode == 2
    assert f"hosts bed0, bed1: it has no Python environment for ranks: lockstep hosts setup {lab.cluster} makes it" in done.stderr
    assert [lab.traces(number, "bare") for number in range(HOSTS)] == ["", ""]


def test_bare_hosts_run_a_job_after_one_command_and_a_second_one_changes_nothing(bare: BedHosts, tmp_path: Path) -> None:
    lab = Lab(bare, tmp_path)
    lab.setup()
    assert all(lab.works(number) for number in range(HOSTS))
    before = [lab.tree(number) for number in range(HOSTS)]
    again = lab.setup().stdout
    assert again.count("ready: ") == HOSTS
    assert "make" not in again
    assert [lab.tree(number) for number in range(HOSTS)] == before
    path = lab.job("small", nodes=HOSTS)
    for number in range(HOSTS):
        lab.put(number, "rank.py", SCRIPT.encode())
    try:
        lab.run(path)
        assert lab.becomes("small", "Complete")
        for number in range(HOSTS):
            made = lab.environments(number)[0]
            assert lab.sh(number, "cat /home/ada/lockstep/workspace/environment") == f"{made} 42"
        advised = re.search(
            r"has no debugpy: on this host, (\S+/uv pip install --python (\S+) debugpy)$",
            lab.about("debug", "small", "a.py", check=False).stderr.strip(),
        )
        assert advised is not None, "the environment has no pip"
        lab.put(0, "wheels/debugpy-1.0-py3-none-any.whl", write_wheel(tmp_path, "debugpy", "1.0", "").read_bytes())
        lab.sh(0, f"runuser -u ada -- {advised[1]} --no-index --find-links /home/ada/lockstep/workspace/wheels")
        lab.sh(0, f"runuser -u ada -- {advised[2]} -c 'import debugpy'")
    finally:
        lab.about("delete", "small", "--yes")


@contextmanager
def package_index(folder: Path, wheels: Path, address: str) -> Iterator[str]:
    """Serve the wheels at an address as an index of one's own, whose certificate is in `folder`/ca.pem and known to nobody; its URL."""
    names = {"small-alpha": "small_alpha", "small-beta": "small_beta"}
    for project, name in names.items():
        page = folder / "served/simple" / project
        page.mkdir(parents=True)
        wheel = next(wheels.glob(f"{name}-*.whl"))
        shutil.move(wheel, page / wheel.name)
        (page / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=index"]
    named = ["-addext", f"subjectAltName=IP:{address}", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*made, *named, "-keyout", folder / "key.pem", "-out", folder / "ca.pem"], check=True, capture_output=True)
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    with ThreadingHTTPServer((address, 0), partial(SimpleHTTPRequestHandler, directory=str(folder / "served"))) as server:
        server.socket = trust.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://{address}:{server.server_port}/simple/"
        finally:
            server.shutdown()
            thread.join()


def test_hosts_install_from_an_index_that_they_trust_and_from_no_other(lab: Lab, tmp_path: Path) -> None:
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    with package_index(tmp_path, lab.house, lab.bed.layout.gateway) as url:
        lab.cluster.write_text(lab.cluster.read_text().replace(f"wheelhouse: {lab.house}", f"index: '{url}'"))
        refused = lab.setup(check=False)
        assert refused.returncode == 1
        assert refused.stderr.count("certificate") >= HOSTS, refused.stderr
        assert [lab.environments(number) for number in range(HOSTS)] == [[], []]
        trusts = 'mkdir -p "${1%/*}"; cp -p "$1" "$1.kept" 2>/dev/null || true; cat >> "$1"'
        try:
            for number in range(HOSTS):
                lab.bed.console(number, "sh", "-c", trusts, "sh", bundle, stdin=(tmp_path / "ca.pem").read_bytes())
            lab.setup()
        finally:
            for number in range(HOSTS):
                lab.bed.console(number, "sh", "-c", 'mv "$1.kept" "$1" 2>/dev/null || rm -f "$1"', "sh", bundle)
    assert all(lab.works(number) for number in range(HOSTS))


def test_a_check_names_the_host_whose_environment_is_not_of_the_lock(lab: Lab) -> None:
    lab.setup()
    other = "env-0123456789abcdef"
    lab.sh(1, f'cd "$1" && mv "$(readlink env)" {other} && ln -sfn {other} env')
    found = lab.type("doctor", str(lab.cluster), check=False).stdout
    assert re.findall(r"^failed +(\w+): its environment (env-\w+) is not of", found, re.MULTILINE) == [("bed1", other)], found
    lab.setup()
    assert "is not of" not in lab.type("doctor", str(lab.cluster), check=False).stdout


@pytest.mark.parametrize("word", ["sending", "installing"])
def test_it_goes_on_where_it_was_killed(bare: BedHosts, tmp_path: Path, word: str) -> None:
    lab = Lab(bare, tmp_path)
    lab.interrupted(word)
    for number in range(HOSTS):  # a folder has an environment's name only when it is one
        assert all(lab.works(number) for _ in lab.environments(number) if lab.sh(number, 'ls -d "$1/env" 2>/dev/null || true'))
    lab.setup()
    assert all(lab.works(number) for number in range(HOSTS))
    assert lab.sh(0, 'ls -A "$1" | grep -E "draft|gone" || true') == ""


@pytest.mark.long
def test_a_host_that_loses_its_power_meanwhile_is_ready_after_the_next_run(bare: BedHosts, tmp_path: Path) -> None:
    lab = Lab(bare, tmp_path)
    command = [sys.executable, "-m", "lockstep.cli.main", "hosts", "setup", str(lab.cluster)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert next((line for line in process.stdout if "bed1: sending" in line), None) is not None
        bed_hosts.power_off(lab.bed.host(1))
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "bed1" in errors
    assert lab.works(0)
    lab.bed.mend()
    lab.setup()
    assert lab.works(1)


def test_a_wheel_that_is_not_the_lock_s_is_refused_before_anything_is_sent(lab: Lab) -> None:
    wheel = write_wheel(lab.house, "small_beta", "1.0", "MORE = 43\n")
    done = lab.setup(check=False)
    assert done.returncode == 1
    expected = re.findall(r"sha256:([0-9a-f]{64})", lab.lock.read_text())[1]
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in done.stderr
    assert expected in done.stderr
    assert [lab.tree(number) for number in range(HOSTS)] == ["", ""]


def test_a_wheel_that_was_changed_on_the_one_host_is_refused_there_and_replaced_by_the_next_run(
    bare: BedHosts, tmp_path: Path, small: None
) -> None:
    lab = Lab(bare, tmp_path, hosts=1)
    wheel = next(lab.house.glob("small_beta*"))
    other = wheel.read_bytes()[:-1] + b"\1"
    script = f'mkdir -p "$1/wheels" && cat > "$1/wheels/{wheel.name}" && chown -R ada:ada /home/ada/.local'
    lab.bed.console(0, "sh", "-c", script, "sh", DATA.format(user="ada"), stdin=other)
    done = lab.setup(check=False)
    assert done.returncode == 1
    assert hashlib.sha256(other).hexdigest() in done.stderr
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in done.stderr
    assert lab.environments(0) == []
    lab.setup()
    assert lab.works(0)


@pytest.mark.long
def test_a_running_job_keeps_its_environment_until_it_is_deleted(lab: Lab) -> None:
    lab.setup()
    (first,) = lab.environments(0)
    path = lab.job("long", nodes=HOSTS)
    for number in range(HOSTS):
        lab.put(number, "rank.py", SCRIPT.encode())
        lab.put(number, "wait", b"")
    try:
        lab.run(path)
        assert eventually(lambda: first in lab.sh(0, "cat /home/ada/lockstep/workspace/environment 2>/dev/null || true"))
        wheels = [*sorted(lab.house.glob("small_*")), write_wheel(lab.house, "small_gamma", "1.0", "")]
        write_lock(lab.lock, wheels)
        lab.setup()
        assert len(lab.environments(0)) == 2
        assert lab.sh(0, 'readlink "$1/env"') != Path(first).name
        assert lab.state("long") == "Running"
        assert first in lab.bed.console(0, "pgrep", "-af", "rank.py")
    finally:
        lab.about("delete", "long", "--yes")
    assert f"remove  {first}" in lab.setup().stdout
    assert first not in lab.environments(0)


def test_root_s_step_is_printed_where_a_user_may_not_linger_by_himself(bare: BedHosts, tmp_path: Path, small: None) -> None:
    lab = Lab(bare, tmp_path, user="bob")
    shown = lab.setup().stdout
    assert "bed0: only root can `sudo loginctl enable-linger bob`" in shown
    assert lab.works(0)


def test_a_package_that_no_wheel_is_for_is_named_before_anything_is_sent(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    next(lab.house.glob("small_beta*")).rename(lab.house / "small_beta-1.0-cp27-none-win32.whl")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")  # (nothing listens there)
    done = lab.setup(check=False)
    assert done.returncode == 1
    assert "small-beta" in done.stderr and "http://127.0.0.1:9/simple/small-" in done.stderr
    assert [lab.tree(number) for number in range(HOSTS)] == ["", ""]


def test_wheels_cross_the_laptop_s_link_once_and_only_their_user_may_write_to_them(bare: BedHosts, tmp_path: Path, small: None) -> None:
    lab = Lab(bare, tmp_path, hosts=3)
    size = sum(path.stat().st_size for path in lab.house.iterdir())
    before = lab.bed.sent()
    shown = lab.setup().stdout
    assert size < lab.bed.sent() - before < 1.5 * size, "three hosts would get three times as much"
    assert "bed0, bed1, bed2: sending 4 files, " in shown and shown.count("sending") == 1
    for number in range(3):
        assert lab.works(number)
        assert lab.sh(number, 'find "$1/wheels" -perm /022; ls -A "$1/wheels" | grep "^\\." || true') == ""


def python_name(lab: Lab, version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the archive that the lab's uv brings a Python from, on machines such as this one."""
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    (folder / "lockstep").mkdir(parents=True)
    (folder / "lockstep/wheels").symlink_to(lab.house)
    uv = next(lab.house.glob("uv-*.whl")).name
    return unquote(install.archive_of({"uv": uv, "version": version}, io.BytesIO())["url"].rpartition("/")[2])


@pytest.mark.long
def test_the_archive_of_a_python_crosses_the_laptop_s_link_once_and_uv_refuses_one_that_it_does_not_know(
    bare: BedHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(bare, tmp_path, hosts=3)
    lab.cluster.write_text(lab.cluster.read_text().replace("environment: {", 'environment: {python: "3.13", '))
    archive = lab.house / python_name(lab, "3.13", tmp_path / "data", monkeypatch)
    (tmp_path / "python").write_bytes(os.urandom(30 << 20))
    with tarfile.open(archive, "w:gz", compresslevel=1) as written:
        written.add(tmp_path / "python", "python/bin/python3.13")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    size = sum(path.stat().st_size for path in lab.house.iterdir())
    before = lab.bed.sent()
    done = lab.setup(check=False)
    assert size < lab.bed.sent() - before < 1.5 * size, "three hosts would get three times as much"
    assert re.findall(r"^bed0, bed1, bed2: sending (\d files?), ", done.stdout, re.MULTILINE) == ["4 files", "1 file"], done.stdout
    assert done.returncode == 1
    assert done.stderr.count(digest) == 3, done.stderr
    for number in range(3):
        assert lab.environments(number) == []
        assert lab.sh(number, f'sha256sum "$1/wheels/{archive.name}"').split()[0] == digest


def test_a_host_that_no_other_one_can_serve_gets_its_wheels_from_the_laptop(lab: Lab) -> None:
    rule = "table ip test {\n chain in {\n type filter hook input priority 0;\n tcp dport 29400-29499 drop\n }\n}\n"
    lab.bed.console(0, "nft", "-f", "-", stdin=rule.encode())
    try:
        shown = lab.setup()
    finally:
        lab.bed.console(0, "nft", "delete", "table", "ip", "test")
    assert "host bed1 can't reach host bed0 (" in shown.stdout + shown.stderr
    assert all(lab.works(number) for number in range(HOSTS))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_bare_hosts_without_a_network_train_to_an_adapter_after_one_command(bare: BedHosts, tmp_path: Path) -> None:
    """All packages of the trainer's lock, as they are installed here: 6 GB, which each host gets, unpacks and imports. It takes some 10
    minutes, and 30 GB of disk.
    """
    lock = installed_wheelhouse(tmp_path, ROOT / "requirements/train.lock")
    lab = Lab(bare, tmp_path, lock=lock)
    assert [lab.sh(number, "ip route show default") for number in range(HOSTS)] == ["", ""]
    lab.setup()
    try:
        for source, target in (("models/tiny-base", "/workspace/models/tiny-base"), ("datasets/demo.jsonl", "/datasets/demo.jsonl")):
            lab.type("cp", str(demo_folder() / source), f"demo:{target}", "--cluster", str(lab.cluster))
        lab.run(ROOT / "manifests/samples/trainingjob.yaml", "--set", "training.optimization.maxSteps=10")
        for number in range(HOSTS):
            (path,) = lab.environments(number)
            assert f"{path}/bin/python" in lab.bed.console(number, "pgrep", "-af", "lockstep_train")
        waited = lab.about("wait", "demo", "--for", "Complete", check=False)
        assert waited.returncode == 0, waited.stdout + waited.stderr + lab.about("logs", "demo", check=False).stdout
        adapter = "/home/ada/lockstep/workspace/runs/demo/adapter/adapter_model.safetensors"
        assert int(lab.sh(0, f"stat -c %s {adapter}")) > 1 << 10
    finally:
        lab.about("delete", "demo", "--yes", check=False)
        shutil.rmtree(lab.house)
