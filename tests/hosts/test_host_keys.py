"""Keys: a host whose key isn't the expected one gets nothing at all, and a key of yours that wants a touch is waited for."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.devcluster.hosts import bed as running
from lockstep.platforms.hosts import ssh
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.ssh import HostUnreachable, Shared, offered_key
from lockstep.programs import output_of
from support.clusters.bed_hosts import WAIT_SECONDS, BedHosts
from support.clusters.bed_ssh import Ways, few_logins, login_to
from support.clusters.touched_agent import TouchedAgent

UNKNOWN = r"its host key is not known, and nothing was sent\."
OTHER = r"its host key is not the expected one, and nothing was sent\."


def config(tmp_path: Path, known: str, *blocks: str) -> str:
    """Path of ssh's configuration of a person, with a file of known hosts. `blocks`: what it says of some hosts."""
    (tmp_path / "known").write_text(known)
    of_all = f"Host *\n  UserKnownHostsFile {tmp_path}/known\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking accept-new\n"
    (tmp_path / "config").write_text("".join((*blocks, of_all)))
    return str(tmp_path / "config")


def known_as(bed: BedHosts, number: int, key: int) -> str:
    """Line of a file of known hosts: the host's address with the key of the host `key`."""
    return f"{bed.host(number).address} {running.host_key(bed.host(key))}\n"


def bastion(bed: BedHosts) -> str:
    """Return what a configuration says of the first host as a jump host."""
    return f"Host bastion\n  HostName {bed.host(0).address}\n  User ada\n  IdentityFile {bed.layout.identity}\n"


def logins_of(bed: BedHosts, number: int) -> str:
    """Everything that the host's sshd wrote down about logins."""
    return bed.console(number, "journalctl", "--unit=ssh", "--output=cat", "--no-pager")


def refused(ways: Ways, bed: BedHosts, message: str, number: int = 0, **login: object) -> None:
    before = logins_of(bed, number).count("Accepted publickey")
    with pytest.raises(HostUnreachable, match=message):
        asyncio.run(output_of(ways.place(number, **login), ["touch", "sent"]))
    assert logins_of(bed, number).count("Accepted publickey") == before
    assert bed.console(number, "find", "/home", "-name", "sent") == ""


def test_an_unknown_key_is_refused_even_if_ssh_itself_would_take_it(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    refused(ways, bed, UNKNOWN, host_key=None, config=config(tmp_path, ""))
    assert (tmp_path / "known").read_text() == ""


def test_a_known_key_lets_programs_run(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    place = ways.place(host_key=None, config=config(tmp_path, known_as(bed, 0, 0)))
    assert asyncio.run(output_of(place, ["hostname"])) == b"bed0\n"


def test_a_changed_key_is_refused(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    refused(ways, bed, OTHER, host_key=None, config=config(tmp_path, known_as(bed, 0, 1)))


def test_a_stated_key_that_is_not_the_hosts_is_refused_whatever_known_hosts_say(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    message = rf"host bed0 can't be reached: {OTHER}.*Host key for bed0 has changed"
    refused(ways, bed, message, host_key=running.host_key(bed.host(1)), config=config(tmp_path, known_as(bed, 0, 0)))


def test_a_key_that_is_stated_anew_does_not_ride_on_an_open_connection(bed: BedHosts, ways: Ways) -> None:
    assert asyncio.run(output_of(ways.place(), ["hostname"])) == b"bed0\n"
    refused(ways, bed, OTHER, host_key=running.host_key(bed.host(2)))


def test_a_host_that_answers_at_anothers_address_is_refused(bed: BedHosts, ways: Ways) -> None:
    login = login_to(bed, 0)
    shared = Shared(replace(login, address=bed.host(1).address), ways.folder)
    with pytest.raises(HostUnreachable, match=OTHER):
        asyncio.run(output_of(HostPlace(shared), ["touch", "sent"]))
    assert bed.console(1, "find", "/home", "-name", "sent") == ""


def test_your_configuration_counts_where_nothing_is_stated(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    host = bed.host(0)
    path = config(
        tmp_path, known_as(bed, 0, 0),
        f"Host study\n  HostName {host.address}\n  User bob\n  IdentityFile {bed.layout.identity}\n  LocalForward 127.0.0.1:1 127.0.0.1:1\n"
        f"  RemoteCommand false\n  RequestTTY force\n  ControlMaster auto\n  ControlPath {tmp_path}/%C\n  ControlPersist yes\n  LogLevel"
        f" QUIET\n\n",
    )  # fmt: skip
    login = replace(login_to(bed, 0), name="study", user=None, identity=None, address=None, host_key=None, config=path)
    shared = Shared(login, ways.folder)
    try:
        assert asyncio.run(output_of(HostPlace(shared), ["id", "-un"])) == b"bob\n"
    finally:
        asyncio.run(shared.close())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config", "known"]


def test_a_jump_host_is_gone_through(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    path, before = config(tmp_path, known_as(bed, 0, 0), bastion(bed)), logins_of(bed, 0).count("Accepted publickey")
    place = ways.place(1, jump="bastion", address=None, name=bed.host(1).address, config=path)
    assert asyncio.run(output_of(place, ["hostname"])) == b"bed1\n"
    assert logins_of(bed, 0).count("Accepted publickey") > before


def test_a_jump_host_that_lets_few_logins_begin_at_once_is_asked_again_until_all_are_through(
    bed: BedHosts, ways: Ways, tmp_path: Path
) -> None:
    path = config(tmp_path, known_as(bed, 0, 0), bastion(bed), f"Host behind*\n  HostName {bed.host(1).address}\n")
    places = [ways.place(1, jump="bastion", address=None, name=f"behind{number}", config=path) for number in range(3)]

    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*(output_of(place, ["hostname"]) for place in places))

    with few_logins(bed, 0):
        assert asyncio.run(all_of_them()) == [b"bed1\n"] * 3


def test_a_jump_host_whose_key_is_not_known_or_has_changed_is_sent_nothing(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    target, before = bed.host(1), logins_of(bed, 0).count("Accepted publickey")
    for known in ("", known_as(bed, 0, 1)):
        path = config(tmp_path, known, bastion(bed), f"Host behind\n  HostName {target.address}\n  ProxyJump bastion\n")
        for way in ({"jump": "bastion", "name": target.address}, {"name": "behind"}):
            login = {"address": None, "config": path, **way}
            refused(ways, bed, r"the key of a jump host on the way there is not known, or not the expected one", 1, **login)
            with pytest.raises(HostUnreachable, match="the key of a jump host"):
                asyncio.run(offered_key(login_to(bed, 1, host_key=None, **login), ways.folder))
        assert (tmp_path / "known").read_text() == known, "and its key is taken from nobody"
    assert logins_of(bed, 0).count("Accepted publickey") == before


def test_a_key_behind_a_jump_host_is_told_pinned_and_checked_through_it(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    target, path = bed.host(1), config(tmp_path, known_as(bed, 0, 0), bastion(bed))
    through: dict[str, Any] = {"jump": "bastion", "address": None, "name": target.address, "config": path}
    on_bastion, on_target = (logins_of(bed, number).count("Accepted publickey") for number in (0, 1))
    key = asyncio.run(offered_key(login_to(bed, 1, host_key=None, **through), ways.folder))
    assert key == running.host_key(target), "the target's key, and not the jump host's"
    assert logins_of(bed, 0).count("Accepted publickey") == on_bastion + 1 and logins_of(bed, 1).count("Accepted publickey") == on_target
    refused(ways, bed, UNKNOWN, 1, host_key=None, **through)
    refused(ways, bed, OTHER, 1, host_key=running.host_key(bed.host(0)), **through)
    assert asyncio.run(output_of(ways.place(1, host_key=key, **through), ["hostname"])) == b"bed1\n"


def test_behind_a_proxy_command_of_your_own_the_host_s_key_is_checked_all_the_same(bed: BedHosts, ways: Ways, tmp_path: Path) -> None:
    first, target = bed.host(0), bed.host(1)
    (tmp_path / "lax").mkdir()
    lax = config(tmp_path / "lax", "")
    proxy = f"ProxyCommand ssh -F {lax} -o BatchMode=yes -i {bed.layout.identity} -W %h:%p ada@{first.address}"
    path = config(tmp_path, "", f"Host behind\n  HostName {target.address}\n  {proxy}\n")
    through: dict[str, Any] = {"name": "behind", "address": None, "config": path}
    before = logins_of(bed, 0).count("Accepted publickey")
    refused(ways, bed, UNKNOWN, 1, host_key=None, **through)
    refused(ways, bed, OTHER, 1, host_key=running.host_key(first), **through)
    assert asyncio.run(output_of(ways.place(1, host_key=running.host_key(target), **through), ["hostname"])) == b"bed1\n"
    assert logins_of(bed, 0).count("Accepted publickey") > before, "they went through the command, whose own checks are yours"


@pytest.fixture
def agent(bed: BedHosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[TouchedAgent]:
    folder = Path(tempfile.mkdtemp(prefix="ls-"))  # (short: sockets are in it)
    agent = TouchedAgent(folder, bed.layout.identity)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.path))
    monkeypatch.setattr(ssh, "HINT_SECONDS", 0.5)
    yield agent
    agent.close()
    shutil.rmtree(folder)


async def test_a_login_that_waits_for_a_touch_says_so_and_goes_on_with_it(bed: BedHosts, agent: TouchedAgent) -> None:
    hints: list[str] = []

    def hear(hint: str) -> None:
        hints.append(hint)
        agent.touched.set()

    shared = Shared(login_to(bed, 0), agent.path.parent, tell=hear)
    await shared.open()
    assert (await shared.control("check"))[0] == 0
    await shared.close()
    assert agent.asked.is_set()
    assert hints == ["host bed0 has not let you in after 0 s: if your key wants a touch, or your agent a confirmation, give it now"]


async def test_a_touch_that_never_comes_ends_in_a_sentence_that_names_the_verb(
    bed: BedHosts, agent: TouchedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        HostUnreachable, match=r"host bed0 can't be reached: it answers, but the login does not end: your key may want a touch.*hosts setup"
    ):
        limit, timeout = asyncio.timeout(None), asyncio.timeout
        monkeypatch.setattr(ssh.asyncio, "timeout", lambda seconds: limit if seconds == ssh.OPEN_SECONDS else timeout(seconds))
        opening = asyncio.create_task(Shared(login_to(bed, 0), agent.path.parent).open())
        assert await asyncio.to_thread(agent.asked.wait, WAIT_SECONDS)
        limit.reschedule(asyncio.get_running_loop().time())
        await opening
