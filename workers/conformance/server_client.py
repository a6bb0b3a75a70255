"""Clients of the engines' own generation routes, for `rolloutctl conform`. An agent has none: it moves no tokens."""

import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import httpx
from anyio import to_thread

from schemas.errors import EngineError
from workers.engines.client import integer_at, list_at, mapping_at
from workers.engines.http import base_url

LOCAL: Final = ("127.0.0.1", "localhost", "::1")


class ServerClient:
    """Streams tokens from a server, and measures the memory of the GPUs beside it."""

    def __init__(self, kind: str, url: str, key: str | None = None) -> None:
        self._kind, self._url = kind, base_url(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=None, trust_env=False)
        self._model: str | None = None

    async def generate(self, prompt: Sequence[int], max_tokens: int, model: str = "") -> AsyncIterator[int]:
        """Yield greedy tokens as they come. Raises EngineError if the request is refused, or breaks off."""
        path, body = await self._request(list(prompt), max_tokens, model)
        made = 0
        try:
            async with self._client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise EngineError(f"{self._url}{path} answered {answer.status_code}: {text[:200]}")
                async for data in _events(answer):
                    event = json.loads(data)
                    if error := event.get("error"):
                        raise EngineError(f"{self._url}{path} refused the request: {str(error)[:200]}")
                    for token in self._new_tokens(event, made):
                        made += 1
                        yield token
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}{path} broke off: {type(error).__name__}: {error}") from error

    async def memory_bytes(self) -> int | None:
        """Return what is in use on this machine's GPUs; None without any, or for a server elsewhere."""
        if httpx.URL(self._url).host not in LOCAL:
            return None
        return await to_thread.run_sync(_gpu_bytes)

    async def close(self) -> None:
        await self._client.aclose()

    async def _request(self, prompt: list[int], max_tokens: int, model: str) -> tuple[str, dict[str, Any]]:
        if self._kind == "sglang":
            sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, "lora_path": model or None}
            return "/generate", body
        if self._model is None:
            self._model = await self._served_model()
        named = model or self._model
        body = {"model": named, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        return "/v1/completions", body | {"ignore_eos": True, "return_token_ids": True}

    async def _served_model(self) -> str:
        """Return the first model that vLLM serves. Raises EngineError."""
        try:
            answer = await self._client.get("/v1/models")
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise EngineError(f"{self._url}/v1/models names no model: {type(error).__name__}: {error}") from error

    def _new_tokens(self, chunk: Mapping[str, Any], made: int) -> list[Any]:
        """Tokens of one event of the stream. SGLang repeats all so far, unless it was launched to stream increments."""
        if self._kind == "vllm":
            choices = list_at(chunk, "choices")
            return list_at(choices[0], "token_ids") if choices and isinstance(choices[0], Mapping) else []
        ids = list_at(chunk, "output_ids")
        total = integer_at(mapping_at(chunk, "meta_info"), "completion_tokens")
        return ids[made:] if total == len(ids) else ids


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the JSON of each event. Its text may have U+2028 or U+0085, which httpx's own `aiter_lines` splits at."""
    rest = b""
    async for chunk in answer.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield line[6:]


def _gpu_bytes() -> int | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    used = done.stdout.split()
    return sum(map(int, used)) << 20 if done.returncode == 0 and used and all(map(str.isdigit, used)) else None
