"""TLS between the control plane's own processes: version 1.3, both sides show a leaf of the serving CA, and the dialer
checks the name that it dialed.

The certificates live at most 90 days, so both ends follow the files: new ones count from the next connection on, and
what cannot be read leaves the last good ones in place.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable

import structlog
from cryptography import x509

from bettercompute.errors import BetterComputeError
from bettercompute.transport.calls import Identity
from bettercompute.transport.tls import ServerSecrets, load_identity
from bettercompute.transport.tls_errors import explain_client_refusal

ALPN = "http/1.1"

_log = structlog.get_logger("bettercompute.server.internal")


class _Handshake(ssl.SSLObject):
    """A listener's handshake that says in the log why it failed: asyncio ends the connection and tells nobody."""

    def do_handshake(self) -> None:
        """Go on with the handshake."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            _log.warning("caller refused", why=explain_client_refusal(error))
            raise


def listener_tls(load: Callable[[], ServerSecrets]) -> ssl.SSLContext:
    """Return a context for a listener that follows `load` and takes nobody without a leaf of the CA in it."""
    newest = following(load, _listener_context)
    first = newest()

    def take_up(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        # Called at every ClientHello, with a name or without: the one place where one connection may differ.
        handshake.context = newest()

    first.sslobject_class = _Handshake
    first.sni_callback = take_up
    return first


def dialer_tls(load: Callable[[], ServerSecrets]) -> Callable[[], ssl.SSLContext]:
    """Return a source of contexts for a dialer; another one whenever `load` gives something else."""
    return following(load, _dialer_context)


def following(
    load: Callable[[], ServerSecrets], build: Callable[[ServerSecrets], ssl.SSLContext]
) -> Callable[[], ssl.SSLContext]:
    """Return a source of contexts that follows `load`; raises what it meets only when there is none to fall back on."""
    held: tuple[ServerSecrets, ssl.SSLContext] | None = None
    complained = ""

    def newest() -> ssl.SSLContext:
        nonlocal held, complained
        try:
            secrets = load()
            if held is None or held[0] != secrets:
                held = secrets, build(secrets)
            complained = ""
        # Certificate and key are two files: between their two renames they do not belong together.
        except (BetterComputeError, OSError, ValueError) as error:
            if held is None:
                raise
            if complained != str(error):
                complained = str(error)
                _log.warning("new certificates not taken up, the last ones stay", error=complained)
        return held[1]

    return newest


def caller_names(certificate_der: bytes | None) -> tuple[str, ...]:
    """Return the DNS names and addresses of a verified certificate."""
    if certificate_der is None:
        return ()
    return names_of(x509.load_der_x509_certificate(certificate_der))


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the DNS names and addresses that a serving certificate is for, in its order."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return tuple(str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress))


def canonical_name(name: str) -> str:
    """Return a name or address as certificates have it: 0:0::1 and ::1 are one address."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower()


def _listener_context(secrets: ServerSecrets) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, secrets)
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session would outlive a certificate that was replaced.
    context.num_tickets = 0
    return context


def _dialer_context(secrets: ServerSecrets) -> ssl.SSLContext:
    return _context(ssl.PROTOCOL_TLS_CLIENT, secrets)


def _context(protocol: int, secrets: ServerSecrets) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    context.load_verify_locations(cadata=secrets.client_ca_pem.decode("ascii"))
    load_identity(context, Identity(secrets.certificate_chain_pem, secrets.private_key_pem))
    return context
