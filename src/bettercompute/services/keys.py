"""The keys that the control plane's services hold, read from the folder that `pki init` made."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.certificates import Authority
from bettercompute.pki.keyfiles import KeyFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKeys:
    """What JoinService needs: it signs node certificates, answers and trust bundles, and opens sealed tokens."""

    node_ca: Authority = field(repr=False)
    join_signing: ec.EllipticCurvePrivateKey = field(repr=False)
    join_encryption: ec.EllipticCurvePrivateKey = field(repr=False)
    serving_ca: x509.Certificate
    command_root: x509.Certificate

    @property
    def serving_ca_pin(self) -> str:
        """The SHA-256 of the serving CA's public key, in hex."""
        return certificates.spki_sha256(self.serving_ca)

    @property
    def serving_ca_pem(self) -> bytes:
        """The serving CA, for clients that cannot pin."""
        return self.serving_ca.public_bytes(Encoding.PEM)


def load_service_keys(folder: KeyFolder) -> ServiceKeys:
    """Read the keys; refuse INVALID_CONFIG what is missing or damaged, naming the file."""
    return ServiceKeys(
        node_ca=folder.authority(keyfiles.NODE_CA),
        join_signing=folder.key(keyfiles.JOIN_SIGNING),
        join_encryption=folder.key(keyfiles.JOIN_ENCRYPTION),
        serving_ca=folder.certificate(keyfiles.SERVING_CA),
        command_root=folder.certificate(keyfiles.COMMAND_ROOT),
    )
