"""The key that a host offers, before anybody trusts it: nothing is sent, and no login is tried.

ssh-keyscan would ask the name alone. This asks by ssh itself, as every other verb does: through jump hosts, with the port and the name of
ssh's own configuration. ssh hands the key to a command of ours, finds it in no file of known hosts, and refuses it.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.plan.hosts.keys import KEY
from lockstep.platforms.hosts.ssh import OPEN_SECONDS, HostUnreachable, Login, Shared, ended, explained

MARK = "lockstep-host-key "
SHOW = f"import sys;a=sys.argv;a[1]=='HOSTNAME' and sys.stderr.write('{MARK}'+a[2]+' '+a[3]+chr(10))"
"""Program that ssh runs with what for, type and base64 of the key."""
KINDS = "ssh-ed25519,ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521,rsa-sha2-512,rsa-sha2-256"


async def offered_key(login: Login, folder: Path) -> str:
    """Return type and base64 of the key that the host has. Raises HostUnreachable, and Failed where this machine's ssh can't tell it."""
    shared = Shared(replace(login, host_key=None), folder, shares=False)
    await shared.prepare()
    nobody = folder / "nobody.known"
    nobody.write_text("", encoding="ascii")
    show = " ".join([_quoted(sys.executable), "-I", "-S", "-c", f'"{SHOW}"', "%I", "%t", "%K"])
    options = {
        "GlobalKnownHostsFile": nobody, "HostKeyAlgorithms": KINDS, "KnownHostsCommand": show, "UpdateHostKeys": "no",
        "UserKnownHostsFile": nobody, "VerifyHostKeyDNS": "no",
    }  # fmt: skip
    command = shared.command(
        "-T", *(part for name, value in options.items() for part in ("-o", f"{name}={value}")), "--", login.name, "true"
    )
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            _, data = await process.communicate()
    except TimeoutError:
        raise HostUnreachable(explained(login, f"no login in {OPEN_SECONDS:.0f} s")) from None
    finally:
        await ended(process)
    errors = data.decode(errors="replace")
    keys = [line.removeprefix(MARK).strip() for line in errors.splitlines() if line.startswith(MARK)]
    if keys and KEY.fullmatch(keys[-1]):
        return keys[-1]
    if "knownhostscommand" in errors.lower():
        raise Failed(
            f"host {login.name}: this machine's ssh is too old to tell its key (OpenSSH 8.5 or newer can): write the line of ssh-keyscan"
            f" {login.name} into host_key"
        )
    raise HostUnreachable(explained(login, errors))


def _quoted(word: str) -> str:
    """A word of ssh's own configuration, which has quotes, and %% for a percent sign."""
    return '"' + word.replace("%", "%%") + '"'
