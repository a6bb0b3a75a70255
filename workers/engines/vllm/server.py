"""The routes of a vLLM server."""

from collections.abc import Mapping
from typing import Final

from workers.engines.client import CallRefused
from workers.engines.http import HttpClient, HttpReader, Route

ROUTES: Final[Mapping[str, Route]] = {
    "start_profile": Route("POST", "/start_profile"),
    "stop_profile": Route("POST", "/stop_profile"),
    "pause_generation": Route("POST", "/pause", query=True, repeatable=True),
    "resume_generation": Route("POST", "/resume", repeatable=True),
    "is_paused": Route("GET", "/is_paused", answer="is_paused"),
    "sleep": Route("POST", "/sleep", query=True, undeclared=frozenset({"level", "mode"})),
    "wake_up": Route("POST", "/wake_up", query=True),
    "is_sleeping": Route("GET", "/is_sleeping", answer="is_sleeping"),
    "release_kv_cache_memory": Route("POST", "/release_kv_cache_memory"),
    "reset_prefix_cache": Route("POST", "/reset_prefix_cache", query=True, answer="success", repeatable=True),
    "reset_encoder_cache": Route("POST", "/reset_encoder_cache", repeatable=True),
    "abort": Route("POST", "/abort_requests", repeatable=True),
    "collective_rpc": Route("POST", "/collective_rpc", answer="results"),
    "init_weight_transfer_engine": Route("POST", "/init_weight_transfer_engine"),
    "start_weight_update": Route("POST", "/start_weight_update"),
    "update_weights": Route("POST", "/update_weights"),
    "finish_weight_update": Route("POST", "/finish_weight_update"),
    "update_weight_version": Route("POST", "/update_weight_version", repeatable=True),
    "get_weight_version": Route("GET", "/weight_info", answer="weight_version"),
    "compute_weight_checksums": Route("POST", "/weight_checker", answer="checksums"),
    "load_lora_adapter": Route("POST", "/v1/load_lora_adapter"),
    "unload_lora_adapter": Route("POST", "/v1/unload_lora_adapter"),
    "list_models": Route("GET", "/v1/models", answer="data"),
    "get_metrics": Route("GET", "/metrics", unlisted=True),
}
"""By the names of `AsyncLLM`'s methods (vllm/entrypoints/**/api_router.py, 0.13 to 0.33)."""


class VLLMReader(HttpReader):
    """A reader of a vLLM server. Its key is the API key."""

    def __init__(self, url: str, key: str | None = None) -> None:
        super().__init__(url, ROUTES, info_path="/server_info?config_format=json", key=key)

    async def info(self) -> Mapping[str, object]:
        """Return the launch settings. A server without the control routes reports its version only."""
        try:
            settings = await self.get(self._info_path)
        except CallRefused as error:
            if error.status != 404:
                raise
            settings = {}
        return self._of_engine({**settings, **await self.get("/version")})


class VLLMServer(HttpClient, VLLMReader):
    """A client of a vLLM server."""
