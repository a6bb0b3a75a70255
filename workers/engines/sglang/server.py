"""The routes of an SGLang server."""

from collections.abc import Mapping
from typing import Final

from workers.engines.http import HttpClient, HttpReader, Route

UNLOAD_S: Final = 2.0
"""How long to wait for an unload. It goes on without us, once the adapter's requests have ended."""

ROUTES: Final[Mapping[str, Route]] = {
    "start_profile": Route("POST", "/start_profile"),
    "stop_profile": Route("POST", "/stop_profile"),
    "pause_generation": Route("POST", "/pause_generation", repeatable=True),
    "continue_generation": Route("POST", "/continue_generation", repeatable=True),
    "abort_request": Route("POST", "/abort_request", repeatable=True),
    "flush_cache": Route("POST", "/flush_cache", query=True, renamed={"timeout_s": "timeout"}, repeatable=True),
    "release_memory_occupation": Route("POST", "/release_memory_occupation"),
    "resume_memory_occupation": Route("POST", "/resume_memory_occupation"),
    "update_weights_from_disk": Route("POST", "/update_weights_from_disk"),
    "update_weights_from_distributed": Route("POST", "/update_weights_from_distributed"),
    "begin_weight_update": Route("POST", "/begin_weight_update"),
    "end_weight_update": Route("POST", "/end_weight_update"),
    "init_weights_update_group": Route("POST", "/init_weights_update_group"),
    "update_weight_version": Route("POST", "/update_weight_version", repeatable=True),
    "check_weights": Route("POST", "/weights_checker", answer="ranks"),
    "get_weight_version": Route("GET", "/model_info", answer="weight_version"),
    "is_ready": Route("GET", "/ready"),
    "load_lora_adapter": Route("POST", "/load_lora_adapter"),
    "unload_lora_adapter": Route("POST", "/unload_lora_adapter", timeout_s=UNLOAD_S),
    "list_models": Route("GET", "/v1/models", answer="data"),
    "get_metrics": Route("GET", "/metrics", unlisted=True),
}
"""By the names of `TokenizerManager`'s methods (sglang/srt/entrypoints/http_server.py)."""


class SGLangReader(HttpReader):
    """A reader of an SGLang server. Its key is the admin key, or the API key if it has no admin key."""

    def __init__(self, url: str, key: str | None = None) -> None:
        super().__init__(url, ROUTES, info_path="/server_info", key=key)


class SGLangServer(HttpClient, SGLangReader):
    """A client of an SGLang server."""
