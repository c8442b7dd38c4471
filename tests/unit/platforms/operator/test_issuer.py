"""Whose token it is, by the public keys of the cluster: signatures, audiences, times, and what makes no request."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from base64 import urlsafe_b64encode
from datetime import datetime, tzinfo
from typing import Any, Self

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from lockstep.api.names import REPORT_AUDIENCE
from lockstep.kube.cluster import ApiError
from lockstep.platforms.operator.authenticate import Bearer, Refusal, bearer_of
from lockstep.platforms.operator.issuer import CONFIGURATION, KEYS, RIGHT, IssuedTokens

NOW = time.time()
ISSUER = "https://kubernetes.default.svc"
RSA_KEY, OTHER_KEY = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
EC_KEY = ec.generate_private_key(ec.SECP256R1())
CLAIMS: dict[str, Any] = {
    "iss": ISSUER, "aud": [REPORT_AUDIENCE], "exp": NOW + 600, "nbf": NOW - 60, "sub": "system:serviceaccount:ns:ml-dev-sa",
    "kubernetes.io": {"namespace": "ns", "pod": {"name": "x-0", "uid": "u-0"}, "serviceaccount": {"name": "ml-dev-sa", "uid": "u"}},
}  # fmt: skip


class StandingStill(datetime):
    """The clock of PyJWT, at NOW: a long run comes to these tests long after it has read this file."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls.fromtimestamp(NOW, tz)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jwt.api_jwt.datetime", StandingStill)


def encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def number(value: int) -> str:
    return encoded(value.to_bytes((value.bit_length() + 7) // 8))


def jwks() -> dict[str, Any]:
    public, point = RSA_KEY.public_key().public_numbers(), EC_KEY.public_key().public_numbers()
    return {
        "keys": [
            {"kid": "rsa", "kty": "RSA", "n": number(public.n), "e": number(public.e)},
            {"kid": "ec", "kty": "EC", "crv": "P-256", "x": number(point.x), "y": number(point.y)},
        ]
    }


def token(claims: dict[str, Any], kid: str = "rsa", alg: str = "RS256", key: rsa.RSAPrivateKey = RSA_KEY) -> str:
    signed = f"{encoded(json.dumps({'alg': alg, 'kid': kid}).encode())}.{encoded(json.dumps(claims).encode())}"
    if kid == "ec":
        first, second = decode_dss_signature(EC_KEY.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        signature = first.to_bytes(32) + second.to_bytes(32)
    else:
        signature = key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{signed}.{encoded(signature)}"


class Api:
    """Serves the issuer and its keys."""

    def __init__(self, refusal: ApiError | None = None) -> None:
        self.asked: list[str] = []
        self.refusal = refusal
        self.renamed: dict[str, str] = {}

    async def document(self, path: str, media_type: str) -> dict[str, Any]:
        self.asked.append(path)
        assert media_type == ("application/jwk-set+json" if path == KEYS else "application/json")  # the API server refuses another (406)
        if self.refusal is not None:
            raise self.refusal
        keys = [{**key, "kid": self.renamed.get(key["kid"], key["kid"])} for key in jwks()["keys"]]
        return {CONFIGURATION: {"issuer": ISSUER}, KEYS: {"keys": keys}}[path]


def bearer(text: str, api: Any = None) -> Bearer:
    cluster: Any = api or Api()
    return asyncio.run(bearer_of(IssuedTokens(cluster), f"Bearer {text}"))


@pytest.mark.parametrize("changed", [{}, {"nbf": NOW + 59}, {"exp": NOW - 30}], ids=["valid", "from a clock ahead", "by a clock behind"])
def test_clocks_may_differ_by_a_minute(changed: dict[str, Any]) -> None:
    assert bearer(token(CLAIMS | changed)) == Bearer("ns", "x-0", "u-0")


@pytest.mark.parametrize(("kid", "alg"), [("rsa", "RS256"), ("ec", "ES256")])
def test_a_token_of_the_cluster_says_whose_pod_it_is(kid: str, alg: str) -> None:
    assert bearer(token(CLAIMS, kid, alg)) == Bearer("ns", "x-0", "u-0")


@pytest.mark.parametrize(
    "text",
    [
        token(CLAIMS, key=OTHER_KEY),
        token(CLAIMS, alg="none"),
        token(CLAIMS, alg="HS256"),
        token(CLAIMS, alg="ES256"),
        token(CLAIMS, kid="unknown"),
        token({**CLAIMS, "iss": "https://elsewhere"}),
        token({**CLAIMS, "exp": NOW - 61}),
        token({**CLAIMS, "exp": "soon"}),
        token({key: value for key, value in CLAIMS.items() if key != "exp"}),
        token({**CLAIMS, "nbf": NOW + 3600}),
        token({**CLAIMS, "aud": ["https://kubernetes.default.svc"]}),
        token({**CLAIMS, "aud": f"{REPORT_AUDIENCE}/more"}),
        token({**CLAIMS, "kubernetes.io": {"namespace": "ns"}}),
        token({**CLAIMS, "kubernetes.io": []}),
        token({**CLAIMS, "sub": "someone"}),
        token(CLAIMS).rpartition(".")[0] + ".",
        token(CLAIMS).replace(".", "", 1),
        "a.b.c",
        "[].[].x",
        "[" * 12_000 + ".e30.x",
        "\udcff.e30.x",
        token({**CLAIMS, "more": "x" * (16 << 10)}),
    ],
)  # fmt: skip
def test_any_other_token_is_refused(text: str) -> None:
    with pytest.raises(Refusal):
        bearer(text)


def test_a_key_of_another_type_checks_no_signature() -> None:
    class Changed(Api):
        async def document(self, path: str, media_type: str) -> dict[str, Any]:
            found = await super().document(path, media_type)
            return {"keys": [{**key, "kty": "oct"} for key in found["keys"]]} if path == KEYS else found

    for text in (token(CLAIMS), token(CLAIMS, "ec", "ES256")):
        with pytest.raises(Refusal):
            bearer(text, Changed())


def test_a_changed_claim_breaks_the_signature() -> None:
    header, _, signature = token(CLAIMS).split(".")
    forged = {**CLAIMS, "kubernetes.io": {"pod": {"name": "y-0", "uid": "u-9"}}}
    with pytest.raises(Refusal):
        bearer(f"{header}.{encoded(json.dumps(forged).encode())}.{signature}")


def test_a_flood_of_tokens_with_unknown_keys_asks_once_a_minute() -> None:
    async def flood(cluster: Any) -> None:
        seconds = itertools.count(0.0, 0.5)
        review = IssuedTokens(cluster, lambda: next(seconds))  # two looks at the clock for the first token, and one for each of the others
        for number in range(121):
            await review(token(CLAIMS, kid=f"made-up-{number % 3}"))

    api = Api()
    asyncio.run(flood(api))
    assert api.asked == [CONFIGURATION, KEYS] * 2


def test_a_key_that_the_api_server_signs_with_since_a_minute_ago_counts() -> None:
    async def rotate(cluster: Any) -> None:
        seconds = iter((0.0, 0.0, 30.0, 60.0, 60.0))
        review = IssuedTokens(cluster, lambda: next(seconds))
        assert await review(token(CLAIMS, kid="next")) == {"authenticated": False}
        cluster.renamed["rsa"] = "next"
        assert await review(token(CLAIMS, kid="next")) == {"authenticated": False}
        assert (await review(token(CLAIMS, kid="next")))["authenticated"]

    asyncio.run(rotate(Api()))


def test_without_the_right_to_the_keys_the_log_has_the_command(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ApiError):
        bearer(token(CLAIMS), Api(ApiError(403, "Forbidden", "no")))
    assert RIGHT in caplog.text


def test_a_key_that_cannot_be_read_refuses_no_token_of_another() -> None:
    class WithAnother(Api):
        async def document(self, path: str, media_type: str) -> dict[str, Any]:
            document = await super().document(path, media_type)
            if path == KEYS:
                document["keys"].insert(0, {"kid": "odd", "kty": "EC", "crv": "P-224", "x": "AA", "y": "AA"})
            return document

    assert bearer(token(CLAIMS), WithAnother()) == Bearer("ns", "x-0", "u-0")
