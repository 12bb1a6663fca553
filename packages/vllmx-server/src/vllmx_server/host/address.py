"""The address of the server: a bound socket, listening once requests can be answered, and the
certificate that it shows there."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from vllmx_core.errors import ConfigError, VllmxError
from vllmx_core.system.files import warn_of_readers

from vllmx_server.config import ServerConfig

if TYPE_CHECKING:
    from ssl import SSLContext

logger = logging.getLogger("vllmx.server")

_BACKLOG = 1024
_FIRST_PASSED = 3
"""The descriptor of the first socket that systemd passes."""
_WRONG_DATES = {9: "is not valid yet", 10: "has expired"}
"""OpenSSL's codes of the errors, and their texts."""


def bind(server: ServerConfig) -> tuple[socket.socket, str]:
    """A bound socket, not listening yet, and its base URL. Raises ConfigError that says what to
    do."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # By its protocol asyncio knows that TCP must not wait for a client's ACK before it sends more.
    listener = (
        socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if server.uds is None
        else socket.socket(socket.AF_UNIX)
    )
    try:
        if server.uds is not None:
            _bind_unix(listener, server.uds)
            return listener, url_of(listener, server)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(server, error) from None
    return listener, url_of(listener, server)


def url_of(listener: socket.socket, server: ServerConfig) -> str:
    """The base URL of a bound socket."""
    if server.uds is not None:
        return f"unix:{server.uds}"
    scheme = "https" if server.ssl_certfile else "http"
    host = f"[{server.host}]" if listener.family == socket.AF_INET6 else server.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def passed_by_systemd(server: ServerConfig) -> tuple[socket.socket | None, ServerConfig]:
    """The socket of a unit that starts the server at the first connection (sd_listen_fds(3)), and
    the configuration with its address; None without such a unit. Raises ConfigError."""
    count = os.environ.pop("LISTEN_FDS", "0")
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()) or count == "0":
        return None, server
    listener = socket.socket(fileno=_FIRST_PASSED)
    if count != "1" or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise ConfigError(
            f"systemd passed {count} sockets, and the server needs one that listens: give its"
            " .socket unit one ListenStream= and Accept=no",
            param="port",
        )
    listener.set_inheritable(False)
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return listener, dataclasses.replace(server, uds=address)
    return listener, dataclasses.replace(server, host=address[0], port=address[1], uds=None)


def bind_operators(server: ServerConfig) -> socket.socket | None:
    """The bound socket of `admin_uds`, its owner's alone; None where there is none. Raises
    ConfigError that says what to do."""
    if server.admin_uds is None:
        return None
    listener = socket.socket(socket.AF_UNIX)
    try:
        _bind_unix(listener, server.admin_uds)
    except OSError as error:
        listener.close()
        raise _cannot_use(server.admin_uds, "admin_uds", error) from None
    return listener


def check_certificate(server: ServerConfig) -> None:
    """Raises ConfigError for a certificate that cannot be used."""
    if server.ssl_certfile is None:
        return
    import ssl  # which costs a start without a certificate 10 ms

    try:
        for path in filter(None, (server.ssl_certfile, server.ssl_keyfile)):
            if stat.S_ISFIFO(os.stat(path).st_mode):  # to open one would wait for its writer
                raise OSError(f"{path} is a pipe, and is read more than once")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, _no_password)
    except OSError as error:  # an SSLError is one
        raise ConfigError(
            f"--ssl-certfile {server.ssl_certfile} and --ssl-keyfile {server.ssl_keyfile} cannot be"
            f" used ({error.strerror or error}): both must be readable PEM files that belong"
            " together",
            param="ssl_certfile",
        ) from None
    warn_of_readers(str(server.ssl_keyfile), "--ssl-keyfile")
    _check_dates(context, server.ssl_certfile)


def reload_certificate(
    server: ServerConfig, tls: SSLContext | None, level: int = logging.INFO
) -> bool:
    """Reads the certificate again, for the connections of `tls` if there is such a context here,
    with a line in the log; False: it cannot be used, and the old one stays. `level`: of the line
    that says that all is well."""
    try:
        check_certificate(server)
        if tls is not None:
            tls.load_cert_chain(str(server.ssl_certfile), server.ssl_keyfile)
    except (VllmxError, OSError) as error:
        logger.error("the certificate stays as it is: %s", error)
        return False
    logger.log(level, "the certificate was read again")
    return True


def _no_password() -> str:
    """Called for an encrypted key; by default OpenSSL would ask at the terminal."""
    raise ConfigError(
        "the key of the certificate is encrypted, and nobody is asked for its password: decrypt it"
        " (openssl pkey -in KEY -out PLAIN) and give --ssl-keyfile PLAIN",
        param="ssl_keyfile",
    )


def _check_dates(context: SSLContext, path: str) -> None:
    """Raises ConfigError for a certificate that is not valid today, by a handshake in memory with a
    client that trusts it alone."""
    import ssl

    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(path)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), context.wrap_bio(up, down, server_side=True))
    for end in (*ends, *ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _WRONG_DATES:
                raise ConfigError(
                    f"--ssl-certfile {path} {_WRONG_DATES[error.verify_code]}: renew it, or set"
                    " this machine's clock",
                    param="ssl_certfile",
                ) from None
            return  # clients have other reasons, and other certificates that they trust
        except ssl.SSLError:
            return


def listen(listener: socket.socket, server: ServerConfig) -> None:
    """Begins to accept connections. Raises ConfigError if another program has taken the address
    since `bind`."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(server, error) from None


def _cannot_listen(server: ServerConfig, error: OSError) -> ConfigError:
    if server.uds is not None:
        return _cannot_use(server.uds, "uds", error)
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        where, param = server.host, "host"
        remedy = "--host must be an address of this machine, such as 127.0.0.1 or 0.0.0.0"
    else:
        where, param = f"{server.host}:{server.port}", "port"
        remedy = "choose another --port, or stop the program that uses it"
    reason = error.strerror or str(error)
    return ConfigError(f"cannot listen on {where} ({reason}): {remedy}", param=param)


def _cannot_use(path: str, param: str, error: OSError) -> ConfigError:
    """The error of a unix socket that cannot be bound."""
    reason, flag = error.strerror or str(error), param.replace("_", "-")
    return ConfigError(
        f"cannot listen on {path} ({reason}): choose another --{flag}, or stop the program that"
        " uses it",
        param=param,
    )


def _bind_unix(listener: socket.socket, path: str) -> None:
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # one whose queue is full would have this process wait
            if probe.connect_ex(path) == errno.ECONNREFUSED:  # left behind by a killed server
                Path(path).unlink()
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(previous)
