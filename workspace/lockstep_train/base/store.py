"""The key-value store in which ranks meet, and the proof of what Lockstep's own ranks put there.

torch's TCPStore asks nobody for anything: whoever reaches rank 0's port may read, set and delete keys. So every value carries an HMAC under
the run's secret over its key and itself, and the name of every key ends with one. A value that doesn't prove itself is as if absent.
A stranger who deletes and overwrites can hold an attempt up; it can't make a rank take a value. Nothing here is hidden from it.
"""

from __future__ import annotations

import hmac
import time
from datetime import timedelta
from typing import Protocol

from torch.distributed import DistStoreError

from lockstep_spec.handshake import mac

POLL_SECONDS = 0.05
"""Time between two looks at a value that a stranger has set, until one comes that proves itself."""
NAME_CHARACTERS = 32
PROOF_CHARACTERS = 64


class Store(Protocol):
    """The part of torch's TCPStore that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def delete_key(self, key: str) -> bool: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def clone(self) -> Store:
        """A connection of its own to the same store."""


class SignedStore:
    """A Store among those who know a secret. Its `get` and `multi_get` wait for `timeout`, as torch's."""

    def __init__(self, store: Store, secret: bytes, timeout: timedelta) -> None:
        self._store, self._secret, self._timeout = store, secret, timeout
        self._proven: dict[str, bytes] = {}
        """Values that `wait` and `check` have read, until they are asked for."""

    def set(self, key: str, value: str) -> None:
        self._store.set(self._name(key), self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        known = [value for key in keys if (value := self._proven.pop(key, None)) is not None]
        return known if len(known) == len(keys) else self._values(keys, self._timeout)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys have values that prove themselves. Raises DistStoreError."""
        self._proven = dict(zip(keys, self._values(keys, timeout), strict=True))

    def check(self, keys: list[str]) -> bool:
        if not self._store.check([self._name(key) for key in keys]):
            return False
        self._proven = self._read(keys)
        return len(self._proven) == len(keys)

    def _values(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        end, strange = time.monotonic() + timeout.total_seconds(), ""
        while not strange or time.monotonic() < end:
            try:
                self._store.wait([self._name(key) for key in keys], timedelta(seconds=max(0.001, end - time.monotonic())))
            except DistStoreError:
                if not strange:
                    raise
                break
            proven = self._read(keys)
            if len(proven) == len(keys):
                return [proven[key] for key in keys]
            strange = next(key for key in keys if key not in proven)
            time.sleep(POLL_SECONDS)
        raise DistStoreError(f"the store's {strange} is of nobody of this run: a stranger reaches rank 0's port")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that has no value of this run's yet, and return the one that it has. `expected` is empty."""
        current = self._store.compare_set(self._name(key), expected, self._sealed(key, desired))
        value = self._opened(key, current)
        if value is None:
            self.set(key, desired)
        return desired.encode() if value is None else value

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._name(key))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._store.set_timeout(timeout)

    def clone(self) -> SignedStore:
        return SignedStore(self._store.clone(), self._secret, self._timeout)

    def _read(self, keys: list[str]) -> dict[str, bytes]:
        """Read values that are there. Return those that prove themselves."""
        values = self._store.multi_get([self._name(key) for key in keys])
        opened = {key: self._opened(key, value) for key, value in zip(keys, values, strict=True)}
        return {key: value for key, value in opened.items() if value is not None}

    def _name(self, key: str) -> str:
        return f"{key}/{mac(self._secret, b'name ' + key.encode())[:NAME_CHARACTERS]}"

    def _sealed(self, key: str, value: str) -> str:
        return self._proof(key, value.encode()) + value

    def _opened(self, key: str, sealed: bytes) -> bytes | None:
        proof, value = sealed[:PROOF_CHARACTERS], sealed[PROOF_CHARACTERS:]
        return value if hmac.compare_digest(proof, self._proof(key, value).encode()) else None

    def _proof(self, key: str, value: bytes) -> str:
        return mac(self._secret, b"value " + key.encode() + b"\0" + value)
