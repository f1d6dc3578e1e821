"""What serves TLS: a certificate and its key, tried before they are used."""

import ssl

from compaction_proxy.core.errors import ConfigError

# By OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED, which Python does not name.
_OUTDATED = {9: "is not valid yet", 10: "has expired"}


def _outdated(context: ssl.SSLContext, certificate: str) -> str | None:
    """Why a client would refuse a certificate for its dates; None if it would not.

    The library reads no dates, but whoever is shown a certificate does: so a handshake is made in memory,
    with a client that trusts exactly this certificate. What else clients find is for who issued it.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    asked, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(answered, asked)
    server = context.wrap_bio(asked, answered, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return _OUTDATED.get(error.verify_code)
    return None


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """What is needed to serve TLS (1.2 and up).

    Args:
        certificate: File of the certificate in PEM, and of those that lead to a known authority.
        key: File of its private key in PEM, without a password.

    Raises:
        ConfigError: They cannot be read or do not belong together, or the certificate's time is over.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except ssl.SSLError as error:
        why = (error.reason or "unreadable").replace("_", " ").lower()
        raise ConfigError(
            f"server.tls_key: no key without a password to server.tls_certificate: {why}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"server.tls_certificate, server.tls_key: cannot be read: {error.strerror}"
        ) from None
    outdated = _outdated(context, certificate)
    if outdated is not None:
        raise ConfigError(f"server.tls_certificate: {certificate} {outdated}")
    return context
