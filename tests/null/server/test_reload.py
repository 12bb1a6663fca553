"""What SIGHUP has read again."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from vllmx_core.errors import ConfigError
from vllmx_server.config import ServerConfig
from vllmx_server.host.address import check_certificate
from vllmx_server.host.process import hypercorn_config

from .conftest import MakeServer


async def test_new_connections_see_a_new_certificate(
    make_server: MakeServer,
    certificate: tuple[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(certificate[0], cert)
    shutil.copy(certificate[1], key)
    caplog.set_level(logging.INFO, "vllmx.server")
    flags = {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}
    async with make_server(flags) as served:
        state = served.server
        state.tls = hypercorn_config(served.state.config).create_ssl_context()
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=state.tls)
        address = server.sockets[0].getsockname()

        async def shown() -> str:
            return await asyncio.to_thread(ssl.get_server_certificate, address)

        first = await shown()
        cert.write_text("no certificate")
        state.reload()
        assert "the certificate stays as it is" in caplog.text
        assert await shown() == first
        subprocess.run(
            ["openssl", "req", "-x509", "-key", str(key), "-out", str(cert), "-days", "3",
             "-subj", "/CN=another"],
            check=True,
        )  # fmt: skip
        state.reload()
        assert "the certificate was read again" in caplog.text
        assert await shown() not in (first, "")
        server.close()
        await server.wait_closed()
    state.tls = None
    state.reload()  # nothing to read


def made_for(folder: Path, start: str, end: str) -> ServerConfig:
    """A server with a certificate for that time, as openssl writes times, of an authority of ours
    that no client knows."""
    (folder / "index.txt").write_text("")
    (folder / "serial").write_text("01\n")
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndir={folder}\ndatabase=$dir/index.txt\nserial=$dir/serial\n"
        "new_certs_dir=$dir\ndefault_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    key, cert = folder / "leaf.key", folder / "leaf.pem"
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for arguments in (
        (*new, "-x509", "-days", "2", "-keyout", folder / "ca.key", "-out", folder / "ca.pem",
         "-subj", "/CN=ours"),
        (*new, "-keyout", key, "-out", folder / "leaf.csr", "-subj", "/CN=127.0.0.1"),
        ("ca", "-batch", "-config", folder / "ca.cnf", "-cert", folder / "ca.pem", "-keyfile",
         folder / "ca.key", "-in", folder / "leaf.csr", "-out", cert, "-startdate", start,
         "-enddate", end, "-notext"),
    ):  # fmt: skip
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    return ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        ("20200101000000Z", "20200201000000Z", "has expired: renew it"),
        ("20990101000000Z", "20990201000000Z", "is not valid yet: .*this machine's clock"),
        ("20200101000000Z", "20990101000000Z", None),
    ],
)
def test_a_certificate_out_of_its_time_is_refused_at_the_start(
    tmp_path: Path, start: str, end: str, message: str | None
) -> None:
    server = made_for(tmp_path, start, end)
    if message is None:
        check_certificate(server)
        return
    with pytest.raises(ConfigError, match=message):
        check_certificate(server)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its key with openssl")
def test_nobody_is_asked_for_the_password_of_a_key(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    """OpenSSL would ask at the terminal, at the start and again at SIGHUP, and wait."""
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", certificate[1], "-aes256", "-passout", "pass:x"]
    subprocess.run([*command, "-out", str(locked)], check=True)
    server = ServerConfig(ssl_certfile=certificate[0], ssl_keyfile=str(locked))
    with pytest.raises(ConfigError, match=r"encrypted.*decrypt it"):
        check_certificate(server)


def test_a_pipe_is_no_certificate(certificate: tuple[str, str], tmp_path: Path) -> None:
    """To open one would wait for its writer: at the start for ever, at SIGHUP with all requests."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for files in ((pipe, certificate[1]), (certificate[0], pipe)):
        server = ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1])
        with pytest.raises(ConfigError, match="is a pipe"):
            check_certificate(server)
