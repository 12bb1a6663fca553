"""Certificates that are replaced on the disk while one process or several answer."""

from __future__ import annotations

import contextlib
import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.null.server.test_reload import made_for
from tests.waiting import PATIENCE_S, wait_until

from .conftest import MakeFake, RunningServer
from .test_workers import worker_of, worker_pids

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes its certificates with openssl"
)
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
PLAIN.check_hostname, PLAIN.verify_mode = False, ssl.CERT_NONE


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A key, and a certificate that it has signed itself."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-keyout", key, "-out", cert, "-subj", f"/CN={name}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def shown_by_all(server: RunningServer) -> dict[int, bytes]:
    """The certificate that a new connection with each worker sees."""
    found: dict[int, bytes] = {}
    with contextlib.ExitStack() as opened:
        while len(found) < 2:
            client = opened.enter_context(httpx.Client(timeout=PATIENCE_S, verify=PLAIN))
            with client.stream("GET", f"{server.url}/health/live") as answer:
                stream = answer.extensions["network_stream"]
                der = stream.get_extra_info("ssl_object").getpeercert(True)
                found[worker_of(client, server)] = der
    return found


def told(server: RunningServer, words: str) -> int:
    return sum(words in line for line in server.lines)


def test_a_hangup_has_every_process_read_the_certificate_again(
    fake_server: MakeFake, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "cert.key"

    def put(name: str) -> bytes:
        made = make_certificate(tmp_path, name)
        for source, target in zip(made, (cert, key), strict=True):
            shutil.copy(source, target)
        return ssl.PEM_cert_to_DER_cert(made[0].read_text())

    first = put("first")
    flags = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--api-workers", "2")
    with fake_server(*flags) as server, httpx.Client(timeout=PATIENCE_S, verify=PLAIN) as early:
        assert set(shown_by_all(server).values()) == {first}
        assert early.get(f"{server.url}/health/live").is_success
        worker = worker_of(early, server)

        cert.write_text("no certificate")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: told(server, "the certificate stays as it is") == 1)
        assert set(shown_by_all(server).values()) == {first}

        second = put("second")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: set(shown_by_all(server).values()) == {second})
        assert set(shown_by_all(server)) == set(worker_pids(server))
        assert early.get(f"{server.url}/health/live").is_success, "what was open goes on"
        assert worker_of(early, server) == worker
        assert told(server, "the certificate stays as it is") == 1
        assert told(server, "the certificate was read again") == 1
        assert told(server, "Traceback") == 0


def test_one_that_has_expired_is_told_of_once_and_the_old_one_stays(
    fake_server: MakeFake, tmp_path: Path
) -> None:
    cert, key = make_certificate(tmp_path, "first")
    with fake_server("--ssl-certfile", str(cert), "--ssl-keyfile", str(key)) as server:
        address = httpx.URL(server.url)
        shown = ssl.get_server_certificate((address.host, address.port or 0))
        expired = made_for(tmp_path, "20200101000000Z", "20200201000000Z")
        shutil.copy(str(expired.ssl_certfile), cert)
        shutil.copy(str(expired.ssl_keyfile), key)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: told(server, "the certificate stays as it is") == 1)
        assert told(server, "has expired: renew it") == 1
        assert told(server, "Traceback") == 0
        assert ssl.get_server_certificate((address.host, address.port or 0)) == shown
        answer = httpx.get(f"{server.url}/health", verify=PLAIN, timeout=PATIENCE_S)
        assert answer.is_success
