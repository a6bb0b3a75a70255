"""A vLLM server with prime-rl's own routes behind vLLM's, as prime-rl's is made (559b44772, `custom_build_app` in
src/prime_rl/inference/vllm/server.py). Three of them have paths of vLLM: /pause, /resume and /update_weights. Run by
the interpreter of a real vLLM: its routers and its handler of refusals are the real ones, and the engine behind them
writes down what it is asked to do.

    python shadowed_vllm.py PORT
"""

import sys
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from vllm.entrypoints.rl.online.api_router import router as vllms
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler


class Engine:
    """What the routes call."""

    def __init__(self) -> None:
        self.pauses: list[dict[str, Any]] = []

    async def pause_generation(self, **arguments: Any) -> None:
        self.pauses.append(arguments)

    async def resume_generation(self) -> None:
        self.pauses.append({"resumed": True})

    async def is_paused(self) -> bool:
        return bool(self.pauses)


def main() -> None:
    """Serve until killed."""
    engine, app, own = Engine(), FastAPI(), APIRouter()
    app.state.engine_client, app.state.args = engine, SimpleNamespace(log_error_stack=False)

    async def pause(request: Request) -> dict[str, str]:
        engine.pauses.append({"by": "another route"})
        return {"status": "paused"}

    async def pauses() -> list[dict[str, Any]]:
        return engine.pauses

    async def version() -> dict[str, str]:
        return {"version": "0.32.0"}

    for path in ("/pause", "/resume", "/update_weights", "/load_lora_adapter", "/init_broadcaster"):
        own.add_api_route(path, pause, methods=["POST"])
    own.add_api_route("/liveness", pause)
    own.add_api_route("/pauses", pauses)
    own.add_api_route("/version", version)
    app.include_router(vllms)
    app.include_router(own)
    app.exception_handler(RequestValidationError)(validation_exception_handler)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
