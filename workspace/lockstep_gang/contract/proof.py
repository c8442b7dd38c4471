"""The job's key, and what is made of it: the signature of a report, the secret of the ranks."""

from __future__ import annotations

import hmac
import re

from lockstep_spec.codec import ContractError
from lockstep_spec.handshake import mac


def parse_key(text: str) -> bytes:
    """The job's key, 32 bytes, from the 64 hexadecimal digits in its Secret or file. Raises ContractError."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text.strip()):
        raise ContractError("the job's key is not 64 hexadecimal digits")
    return bytes.fromhex(text.strip())


def report_signature(key: bytes, body: bytes) -> str:
    """Value of the header X-Lockstep-Signature: HMAC-SHA256 of the report's body under the job's key (32 bytes), in hex."""
    return mac(key, body)


def is_report_signature(key: bytes, body: bytes, signature: str) -> bool:
    return hmac.compare_digest(report_signature(key, body).encode(), signature.encode("utf-8", "replace"))


def ranks_secret(key: bytes, job: str) -> str:
    """Secret of a job's ranks, which says nothing about the job's key. Each attempt's is derived from it."""
    return mac(key, b"secret of the ranks\n" + job.encode())
