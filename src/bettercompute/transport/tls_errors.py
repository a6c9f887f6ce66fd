"""TLS failures in words: who refused what, and what helps. OpenSSL's names in, a `DialKind` and a sentence out."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from bettercompute.transport.calls import DialKind

# Alerts that the other end sent, by OpenSSL's reason.
ALERTS: Mapping[str, tuple[DialKind, str]] = {
    "TLSV1_ALERT_UNKNOWN_CA": (
        DialKind.UNKNOWN_CA,
        "the peer refused our certificate: it does not know the CA that signed it (unknown CA); join this site again",
    ),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": (
        DialKind.CERTIFICATE_EXPIRED,
        "the peer refused our certificate: it has expired; renew it or join again, and check this host's clock",
    ),
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": (
        DialKind.NO_CERTIFICATE,
        "the peer requires a client certificate and got no certificate; join first",
    ),
    "TLSV1_ALERT_PROTOCOL_VERSION": (DialKind.TLS, "the peer does not speak TLS 1.3, and nothing else is spoken here"),
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": (DialKind.NOT_HTTP2, "the peer does not speak HTTP/2 (ALPN h2)"),
    "TLSV1_UNRECOGNIZED_NAME": (DialKind.SERVER_NAME, "the peer does not serve the name that was asked for"),
}
PIN_MISMATCH = (
    "the gateway's certificate does not come from the pinned serving CA (pin mismatch): this is not our gateway, "
    "or its CA was replaced"
)
_REFUSED_CERTIFICATE = frozenset(
    {
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "TLSV1_ALERT_ACCESS_DENIED",
        "TLSV1_ALERT_DECRYPT_ERROR",
    }
)

# X509_V_ERR_*: what our own verification found.
_NAME_MISMATCH = frozenset({62, 64})
_NO_CHAIN = frozenset({2, 18, 19, 20, 21})
_OUT_OF_DATE = frozenset({9, 10})


def explain_tls_error(error: BaseException) -> tuple[DialKind, str]:
    """Return what went wrong with a connection's TLS, as the dialer sees it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_verification(error)
    reason = getattr(error, "reason", None) or ""
    if reason in ALERTS:
        return ALERTS[reason]
    if reason in _REFUSED_CERTIFICATE:
        return DialKind.CERTIFICATE_REFUSED, f"the peer refused our certificate ({reason.lower().replace('_', ' ')})"
    return DialKind.TLS, f"TLS failed: {reason.lower().replace('_', ' ') or error}"


def _explain_verification(error: ssl.SSLCertVerificationError) -> tuple[DialKind, str]:
    if error.verify_code in _NAME_MISMATCH:
        return (
            DialKind.SERVER_NAME,
            f"the gateway's certificate is for another name ({error.verify_message}); set gateway_server_name",
        )
    if error.verify_code in _NO_CHAIN:
        return (
            DialKind.PIN_MISMATCH,
            PIN_MISMATCH,
        )
    return DialKind.SERVER_CERTIFICATE, f"the gateway's certificate was refused: {error.verify_message}"


def explain_client_refusal(error: BaseException) -> str:
    """Return why a server's handshake failed, for its log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OUT_OF_DATE:
            return f"client certificate expired or not yet valid: {error.verify_message}"
        if error.verify_code in _NO_CHAIN:
            return f"client certificate of an unknown CA: {error.verify_message}"
        return f"client certificate refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return str(error) or error.__class__.__name__
