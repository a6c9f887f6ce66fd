"""TLS as this project speaks it: version 1.3 only, ALPN h2, the serving CA pinned by its key and nothing else.

docs/protocol.md, "Transport", and decisions 0023, 0024 and 0110: the dialer leaves
the dates of the gateway's certificate to its caller, who judges them by the server's own time, so that a host without
a clock can connect. A server asks every client for a certificate and verifies one that is shown, dates included;
having none is a matter for the call (Join has none).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bettercompute.pki.identity import UNREADABLE
from bettercompute.transport.calls import Identity, ServerCertificate

ALPN = "h2"
# X509_V_FLAG_NO_CHECK_TIME: not named by the ssl module.
NO_CHECK_TIME = 0x200000
# _ssl.ENCODING_DER, for Python before 3.13.
_ENCODING_DER = 2
PIN_BYTES = 32


@dataclass(frozen=True, slots=True)
class ServerSecrets:
    """What a server shows and whom it believes; all PEM.

    The serving CA must be in the chain: dialers look for it there.
    """

    certificate_chain_pem: bytes
    private_key_pem: bytes = field(repr=False)
    client_ca_pem: bytes


class AlertKeepingObject(ssl.SSLObject):
    """A handshake that, when it fails, hands over the alert that asyncio would throw away."""

    outgoing: ssl.MemoryBIO | None = None

    def do_handshake(self) -> None:
        """Go on with the handshake; the error of a failed one carries the bytes for the peer as `alert`."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if self.outgoing is not None:
                error.alert = self.outgoing.read()  # type: ignore[attr-defined] # read by the server's accept loop
            raise


class ServerContext(ssl.SSLContext):
    """A server's context, whose handshakes keep their alerts."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """Wrap a connection's buffers."""
        wrapped = super().wrap_bio(incoming, outgoing, *args, **options)
        if isinstance(wrapped, AlertKeepingObject):
            wrapped.outgoing = outgoing
        return wrapped


def validity(identity: Identity) -> str:
    """Return from when to when a dialer's own certificate is valid: what to look at when it is refused."""
    leaf = x509.load_pem_x509_certificate(identity.certificate_chain_pem)
    begins, ends = (f"{at:%Y-%m-%d %H:%M:%S}" for at in (leaf.not_valid_before_utc, leaf.not_valid_after_utc))
    return (
        f"it is valid from {begins} to {ends} UTC: compare the clocks of both hosts, and join again if it is not that"
    )


def server_context(secrets: ServerSecrets) -> ssl.SSLContext:
    """Return the context for a listener."""
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = AlertKeepingObject
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A resumed session would outlive the rotation of the client CA; without tickets a handshake is cheaper, too.
    context.num_tickets = 0
    context.set_alpn_protocols([ALPN])
    context.verify_mode = ssl.CERT_OPTIONAL
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=secrets.client_ca_pem.decode("ascii"))
    load_identity(context, Identity(secrets.certificate_chain_pem, secrets.private_key_pem))
    return context


def reloading(load: Callable[[], ServerSecrets]) -> Callable[[], ssl.SSLContext]:
    """Return a source of contexts that follows `load`.

    A new one whenever the secrets differ, for new connections only.
    """
    held: tuple[ServerSecrets, ssl.SSLContext] | None = None

    def context() -> ssl.SSLContext:
        nonlocal held
        secrets = load()
        if held is None or held[0] != secrets:
            held = secrets, server_context(secrets)
        return held[1]

    return context


def probe_context() -> ssl.SSLContext:
    """Return a context that believes anybody and shows nothing, to look at the chain of an unknown server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def dialer_context(*, serving_ca_pem: bytes, identity: Identity | None) -> ssl.SSLContext:
    """Return a context that believes the pinned CA alone, checks the name, and leaves the dates to the caller."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    # Partial: the pin may be an intermediate's.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    context.load_verify_locations(cadata=serving_ca_pem.decode("ascii"))
    if identity is not None:
        load_identity(context, identity)
    return context


def load_identity(context: ssl.SSLContext, identity: Identity) -> None:
    """Give a context its certificate and key; the ssl module reads files only, so they go through one in memory."""
    with _file_of(identity.certificate_chain_pem + b"\n" + identity.private_key_pem) as path:
        context.load_cert_chain(path)


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Give `content` a path for a moment: in memory where Linux and /proc allow, else a file that only we can read."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        descriptor = os.memfd_create("identity", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, content)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile(prefix="bc-identity-") as file:
        file.write(content)
        file.flush()
        yield file.name


def spki_sha256(certificate_der: bytes) -> bytes:
    """Return the SHA-256 of a certificate's public key, as pins are written."""
    key = x509.load_der_x509_certificate(certificate_der).public_key()
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def find_pinned(chain: tuple[bytes, ...], *, pin: bytes) -> bytes | None:
    """Return the certificate of a chain (DER) whose key is the pinned one, as PEM; None when there is none."""
    for der in chain:
        try:
            matches = spki_sha256(der) == pin
        except UNREADABLE:
            continue  # not a certificate that could be pinned
        if matches:
            return ssl.DER_cert_to_PEM_cert(der).encode("ascii")
    return None


def pem_matches(pem: bytes, *, pin: bytes) -> bool:
    """Whether a cached certificate is the pinned one."""
    try:
        return spki_sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))) == pin
    except ValueError:
        return False


def shown_chain(ssl_object: ssl.SSLObject) -> tuple[bytes, ...]:
    """Return the chain as the peer sent it, verified or not (DER, leaf first)."""
    return _chain(ssl_object, "get_unverified_chain")


def verified_chain(ssl_object: ssl.SSLObject) -> tuple[bytes, ...]:
    """Return the chain as TLS verified it, root included (DER, leaf first); () when the peer showed no certificate."""
    return _chain(ssl_object, "get_verified_chain")


def _chain(ssl_object: ssl.SSLObject, method: str) -> tuple[bytes, ...]:
    if ssl_object.getpeercert(binary_form=True) is None:
        return ()
    if hasattr(ssl_object, method):  # Python 3.13
        return tuple(getattr(ssl_object, method)())
    private: Any = ssl_object._sslobj  # type: ignore[attr-defined] # noqa: SLF001 - public only from Python 3.13 on
    return tuple(
        ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in getattr(private, method)() or ()
    )


def server_certificate(der: bytes) -> ServerCertificate:
    """Return a gateway's leaf with its dates in Unix milliseconds."""
    certificate = x509.load_der_x509_certificate(der)
    return ServerCertificate(
        der=der,
        not_before_ms=_milliseconds(certificate.not_valid_before_utc),
        not_after_ms=_milliseconds(certificate.not_valid_after_utc),
    )


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 1000
