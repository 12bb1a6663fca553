"""Settings of the HTTP server itself; names are vLLM's where it has one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vllmx_core.errors import ConfigError
from vllmx_core.system.logs import check_log_format, check_log_level

from vllmx_server.limits.priorities import priority_ranges
from vllmx_server.watch.collector import check_endpoint


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything about the socket and the limits of the API; the engine's part is EngineConfig."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    """Path of a unix socket instead of host and port."""
    root_path: str = ""
    api_workers: int | None = 1
    """Processes that answer requests; with one, the supervisor is it. None: as many as suit the
    machine."""
    api_key: tuple[str, ...] = ()
    """Accepted bearer tokens; empty: no authorisation."""
    admin_key: tuple[str, ...] = ()
    """Bearer tokens for the routes of operators; empty: nobody may use those."""
    admin_uds: str | None = None
    """Path of a unix socket for the routes of operators, which are nowhere else then."""
    api_keys_file: str | None = None
    """JSON file of further keys, by their digests, with what each may do (`vllmx keys add`)."""
    priority_range: tuple[str, ...] = ()
    """Allowed `priority` of requests: `LEAST:GREATEST` for everybody ("0:" by default), and
    `KEY=LEAST:GREATEST` for the holder of an API key."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    hsts_max_age_s: int = 0
    """Seconds that browsers shall reach this host by TLS alone, on all its ports; 0: no header."""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    allowed_hosts: tuple[str, ...] = ()
    """Names that a Host header may have in addition to the server's own while it listens on
    loopback; "*": any."""
    max_connections: int | None = None
    """Open connections in all; None: what the limit of open files allows, 16384 at most."""
    max_connections_per_address: int | None = None
    """Open connections from one address; None: half of all."""
    max_body_bytes: int = 8 << 20
    max_concurrent_requests: int = 4096
    """Generation requests in flight, queue included; more get 503."""
    header_timeout_s: float = 15.0
    """Seconds that a client has from its first byte to the end of the headers."""
    body_timeout_s: float = 60.0
    """Seconds that a client has to send a request body."""
    send_timeout_s: float = 300.0
    """Seconds without taking anything of an answer before a client counts as gone."""
    request_timeout_s: float = 0.0
    """Seconds from the headers of a request to the end of its answer; 0: no limit."""
    queue_timeout_s: float = 0.0
    """Seconds that a request may wait for its turn; 0: no limit."""
    sse_ping_interval_s: float = 15.0
    """Seconds between comments of a stream that waits for its next token; 0: none."""
    cached_models: bool = True
    """Models in the Hugging Face cache are loaded on demand if none is named."""
    model_wait_s: float = 120.0
    """Seconds that a request waits for its model to be loaded."""
    idle_unload_s: float = 0.0
    """A model that nobody asked for so long is unloaded; 0: never."""
    drain_timeout_s: float = 30.0
    """Seconds that SIGTERM waits for requests in flight."""
    data_dir: str | None = None
    """Folder for files, batches, responses and conversations; None: they end with the server."""
    max_file_bytes: int = 200 << 20
    """The largest file that may be uploaded, in bytes."""
    max_stored_bytes: int = 4 << 30
    """Bytes of all files of one API key, as many again of its responses, and of its
    conversations."""
    max_stored_files: int = 10_000
    """Files of one API key, and as many batches that have ended."""
    max_stored_days: float = 30.0
    """Days that files, batches, responses and conversations are kept."""
    trust_request_chat_template: bool = False
    """Requests may bring a chat template of their own."""
    enable_force_include_usage: bool = False
    """Every stream of both completions ends with the usage, also where the request does not ask."""
    enable_per_request_metrics: bool = False
    """Chats and completions with one choice report their times."""
    enable_tokenizer_info_endpoint: bool = False
    """GET /tokenizer_info shows the configuration of the tokenizer and the chat template."""
    mcp_config: str | None = None
    """JSON file of MCP servers whose tools requests may ask for; None: there are none."""
    mcp_max_rounds: int = 8
    """Answers of the model in one response, each but the last of which called such tools."""
    lora_root: str | None = None
    """The folder below which operators may load LoRA adapters; None: they may load none."""
    apis: tuple[str, ...] = ()
    """APIs of other servers that are on, by name; an entry may hold several, with commas between
    them."""
    web: bool = True
    """The web page at "/"."""
    otlp_traces_endpoint: str | None = None
    """URL of a collector of OpenTelemetry, over HTTP; "env": what the variables of OpenTelemetry
    say. None: no traces."""
    disable_access_log: bool = False
    enable_log_requests: bool = False
    """Log each prompt in a line."""
    max_log_len: int = 1024
    """Characters of a prompt in such a line."""
    log_level: str = "info"
    log_format: str = "text"
    """text, or json: an object a line."""

    def __post_init__(self) -> None:
        names = (name.strip() for entry in self.apis for name in entry.split(","))
        object.__setattr__(self, "apis", tuple(dict.fromkeys(filter(None, names))))
        self._check_interval("port", 0, 65535)
        if self.api_workers is not None:
            self._check_interval("api_workers", 1, 256)
        for name in ("max_connections", "max_connections_per_address"):
            if getattr(self, name) is not None:
                self._check_interval(name, 1, 1 << 20)
        self._check_interval("header_timeout_s", 0.001, 86400)
        self._check_interval("max_body_bytes", 1, 1 << 40)
        self._check_interval("max_file_bytes", 1, 1 << 40)
        self._check_interval("max_stored_bytes", 1, 1 << 50)
        self._check_interval("max_stored_files", 1, 1 << 30)
        self._check_interval("max_stored_days", 0.0001, 36500)
        self._check_interval("max_concurrent_requests", 1, 1 << 20)
        self._check_interval("body_timeout_s", 0.001, 86400)
        self._check_interval("send_timeout_s", 0.001, 86400)
        self._check_interval("request_timeout_s", 0, 1e9)
        self._check_interval("queue_timeout_s", 0, 1e9)
        self._check_interval("sse_ping_interval_s", 0, 86400)
        self._check_interval("drain_timeout_s", 0, 86400)
        self._check_interval("mcp_max_rounds", 1, 100)
        self._check_interval("max_log_len", 1, 1 << 20)
        self._check_interval("model_wait_s", 0.001, 86400)
        self._check_interval("idle_unload_s", 0, 1e9)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile go together: give both")
        self._check_interval("hsts_max_age_s", 0, 1 << 31)
        if self.hsts_max_age_s and self.ssl_certfile is None:
            raise ConfigError(
                "--hsts-max-age-s goes with --ssl-certfile: browsers heed it over TLS alone; where"
                " a proxy has the certificate, set the header there",
                param="hsts_max_age_s",
            )
        if self.admin_uds is not None and _same_path(self.admin_uds, self.uds):
            raise ConfigError(
                "--admin-uds must be the path of a socket of its own, not that of --uds",
                param="admin_uds",
            )
        for name in ("admin_key", "api_key"):
            _check_keys(getattr(self, name), name)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"--root-path must begin and not end with a slash, got {self.root_path!r}",
                param="root_path",
            )
        priority_ranges(self.priority_range, self.api_key)
        check_endpoint(self.otlp_traces_endpoint)
        check_log_level(self.log_level)
        check_log_format(self.log_format)

    @property
    def lifetime_s(self) -> int:
        """`max_stored_days` in seconds."""
        return round(self.max_stored_days * 86400)

    def _check_interval(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be between {low} and {high}, got {value}",
                param=name,
            )


def _same_path(path: str, other: str | None) -> bool:
    """True if a path is empty or another spelling of `other`."""
    return not path or (other is not None and os.path.realpath(path) == os.path.realpath(other))


def _check_keys(keys: tuple[str, ...], name: str) -> None:
    """Raises ConfigError for a key that no header can carry; the key itself is not shown."""
    flag = f"--{name.replace('_', '-')}"
    if not all(keys):
        raise ConfigError(f"{flag} is empty: give a key or leave it out", param=name)
    if any(key != key.strip() or not key.isprintable() for key in keys):
        raise ConfigError(
            f"{flag} begins or ends with a space or has a line break or another control character,"
            " which no client can send: leave it out (a file that was read may end with one)",
            param=name,
        )
