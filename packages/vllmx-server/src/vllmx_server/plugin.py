"""The APIs of this distribution; see `vllmx_core.plugins.hooks`."""

from __future__ import annotations

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import ApiSpec


@hookimpl
def vllmx_apis() -> tuple[ApiSpec, ...]:
    return (
        _api("adapters", "adapters.routes:AdaptersApi"),
        _api("audio", "audio.routes:AudioApi"),
        _api("chat", "chat.routes:ChatApi"),
        _api("completions", "completions.routes:CompletionsApi"),
        _api("documentation", "openapi.routes:DocumentApi"),
        _api("files and batches", "batches.api:BatchesApi"),
        _api("invocations", "invocations.routes:InvocationsApi"),
        _api("messages", "messages.routes:MessagesApi"),
        _api("operators", "operators.routes:OperatorsApi"),
        _api("pooling", "pooling.routes:PoolingApi"),
        _api("responses", "responses.api:ResponsesApi"),
        _api("sessions", "sessions.routes:SessionsApi"),
        _api("status", "status.routes:StatusApi"),
        _api("text", "text.routes:TextApi"),
        _api("tokenizer info", "text.routes:TokenizerInfoApi", "enable_tokenizer_info_endpoint"),
        _api("web page", "web.routes:WebApi", "web"),
        _named("cohere", "cohere.routes:CohereApi"),
        _named("kserve", "kserve.routes:KServeApi"),
        _named("llamacpp", "llamacpp.routes:LlamaCppApi"),
        _named("ollama", "ollama.routes:OllamaApi"),
        _named("tei", "tei.routes:TEIApi"),
    )


def _api(name: str, where: str, switch: str = "") -> ApiSpec:
    return ApiSpec(name, f"vllmx_server.apis.{where}", switch)


def _named(name: str, where: str) -> ApiSpec:
    """An API of another server, for `--apis`."""
    return ApiSpec(name, f"vllmx_server.apis.{where}", by_name=True)
