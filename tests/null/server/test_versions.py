"""Releases of hypercorn, h11 and h2 that were not tested with the server's subclasses."""

from __future__ import annotations

import pytest
from vllmx_core.errors import ConfigError
from vllmx_server.config import ServerConfig
from vllmx_server.host.process import hypercorn_config
from vllmx_server.http.connections import settings


def test_tested_releases_serve() -> None:
    hypercorn_config(ServerConfig())


@pytest.mark.parametrize("found", ["0.17.3", "0.19.0", "1.0rc1"])
def test_untested_releases_are_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(settings, "version", lambda _: found)
    with pytest.raises(ConfigError) as refused:
        hypercorn_config(ServerConfig())
    assert f"hypercorn {found} is installed" in refused.value.message
    assert "pip install 'hypercorn>=0.18,<0.19'" in refused.value.message
