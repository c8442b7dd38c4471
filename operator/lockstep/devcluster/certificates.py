"""The cluster's certificates and kubeconfig files: one authority, one key pair a component."""

from __future__ import annotations

import base64
import datetime
import ipaddress
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lockstep_spec.files import write_durably

VALID_DAYS = 365


def _write(path: Path, data: bytes) -> None:
    """Write never readably by others, since most of these are keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data, 0o600)


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _name(common: str, *organizations: str) -> x509.Name:
    """Kubernetes reads the common name as the user and the organizations as its groups."""
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization) for organization in organizations]
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common), *parts])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


class Authority:
    """The cluster's certificate authority, made on first use and kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "ca.crt").exists():
            key = ec.generate_private_key(ec.SECP256R1())
            name = _name("lockstep-devcluster")
            certificate = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            _write(folder / "ca.key", _key_bytes(key))
            _write(folder / "ca.crt", certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        loaded = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise TypeError(f"{folder / 'ca.key'} is not an elliptic-curve key: remove it with `lockstep devcluster down`")
        self.key = loaded
        self.certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())

    def issue(
        self, file: str, common: str, *groups: str, addresses: tuple[str, ...] = (), names: tuple[str, ...] = (), renew: bool = False
    ) -> Path:
        """A key pair `file`.crt/.key for client and server use; the path of the certificate. An existing one is kept, unless renewed."""
        target = self.folder / f"{file}.crt"
        if target.exists() and not renew:
            return target
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(common, *groups), self.certificate.subject, key).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        alternatives: list[x509.GeneralName] = [x509.DNSName(n) for n in names]
        alternatives += [x509.IPAddress(ipaddress.ip_address(a)) for a in addresses]
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        _write(target.with_suffix(".key"), _key_bytes(key))
        _write(target, builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return target

    def service_account_key(self) -> Path:
        """The key that signs ServiceAccount tokens."""
        path = self.folder / "service-accounts.key"
        if not path.exists():
            key = ec.generate_private_key(ec.SECP256R1())  # the API server reads the public half only from this older form
            form = serialization.PrivateFormat.TraditionalOpenSSL
            _write(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return path

    def kubeconfig(self, path: Path, server: str, user: str, *groups: str, context: str, renew: bool = False) -> Path:
        """A kubeconfig for the user in these groups, with everything inside the file."""
        certificate = self.issue(f"user-{path.name}" if renew else f"user-{user.replace(':', '-')}", user, *groups, renew=renew)

        def inline(file: Path) -> str:
            return base64.b64encode(file.read_bytes()).decode()

        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": context, "cluster": {"server": server, "certificate-authority-data": inline(self.folder / "ca.crt")}}],
            "users": [
                {
                    "name": user,
                    "user": {"client-certificate-data": inline(certificate), "client-key-data": inline(certificate.with_suffix(".key"))},
                }
            ],
            "contexts": [{"name": context, "context": {"cluster": context, "user": user}}],
            "current-context": context,
        }
        _write(path, yaml.safe_dump(document).encode())
        return path
