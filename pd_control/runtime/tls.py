"""TLS contexts of the control plane, from the configured files."""

from __future__ import annotations

import ssl

from pd_control.config import ConfigError, Network


def server_context(network: Network) -> ssl.SSLContext | None:
    """None without a certificate. With a CA, clients must show a certificate of it too."""
    if network.tls_cert_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, network)
    if network.tls_ca_file is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(network: Network) -> ssl.SSLContext | None:
    """None if neither a certificate nor a CA is configured."""
    if network.tls_cert_file is None and network.tls_ca_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    _load(context, network)
    return context


def _load(context: ssl.SSLContext, network: Network) -> None:
    try:
        if network.tls_cert_file is not None:
            context.load_cert_chain(network.tls_cert_file, network.tls_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("network.tls_cert_file", "a usable certificate", str(error)) from None
    try:
        if network.tls_ca_file is not None:
            context.load_verify_locations(network.tls_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("network.tls_ca_file", "a usable CA bundle", str(error)) from None
