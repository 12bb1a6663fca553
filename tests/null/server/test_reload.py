"""What SIGHUP has read again."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from vllmx_server.running import hypercorn_config

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
        state = served.state
        state.tls = hypercorn_config(state.config).create_ssl_context()
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
