"""The report server's certificate, and the authority that pods trust it by. Made here, kept in a Secret, renewed before it expires.

The authority is kept when the certificate is renewed: its PEM text stands in the frozen run of every running gang.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
SERVER_DAYS = 365
RENEW_DAYS = 30
_BACKDATE = timedelta(minutes=5)  # clocks of nodes differ


@dataclass(frozen=True)
class Certificates:
    """PEM texts, as they stand in the Secret."""

    ca_cert: str
    ca_key: str
    tls_cert: str
    tls_key: str


def make_certificates(dns_names: tuple[str, ...], now: datetime) -> Certificates:
    """A new authority and a server certificate by it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Lockstep report authority")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = (
        _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    authority = builder.sign(key, hashes.SHA256())
    return renew(Certificates(_pem(authority), _key_pem(key), "", ""), dns_names, now)


def renew(old: Certificates, dns_names: tuple[str, ...], now: datetime) -> Certificates:
    """A new server certificate by the same authority."""
    authority = x509.load_pem_x509_certificate(old.ca_cert.encode())
    authority_key = serialization.load_pem_private_key(old.ca_key.encode(), password=None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)  # noqa: S101 (made above)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_names[0][:64])])
    builder = (
        _builder(subject, authority.subject, key.public_key(), now, SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    return Certificates(old.ca_cert, old.ca_key, _pem(builder.sign(authority_key, hashes.SHA256())), _key_pem(key))


def check(certificates: Certificates) -> None:
    """Raises ValueError where one of the texts is not what it should be."""
    for text in (certificates.ca_cert, certificates.tls_cert):
        x509.load_pem_x509_certificate(text.encode())
    for text in (certificates.ca_key, certificates.tls_key):
        serialization.load_pem_private_key(text.encode(), password=None)


def needs_renewal(certificates: Certificates, dns_names: tuple[str, ...], now: datetime) -> bool:
    """Return True if it ends within 30 days or is for other names."""
    certificate = x509.load_pem_x509_certificate(certificates.tls_cert.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    return certificate.not_valid_after_utc - now < timedelta(days=RENEW_DAYS) or set(names) != set(dns_names)


@lru_cache(maxsize=1)
def authority_made(certificates: Certificates) -> datetime:
    """Time at which the authority was made."""
    return x509.load_pem_x509_certificate(certificates.ca_cert.encode()).not_valid_before_utc + _BACKDATE


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """Every name that pods of the cluster may call the Service by."""
    short = f"{service}.{namespace}"
    return f"{short}.svc", service, short, f"{short}.svc.cluster.local"


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - _BACKDATE)
        .not_valid_after(now.astimezone(UTC) + timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()
