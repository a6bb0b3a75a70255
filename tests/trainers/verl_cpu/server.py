"""An engine with the methods of verl's `vLLMHttpServer` (0.9.1), around a small transformer on the CPU.

It keeps a diary for the test: which bytes were loaded under which label, which it generated with, and what it recorded.
A test interferes by files in the same folder:

    hold-N             generation on the weights of step N waits until the file is gone
    die-R-N            replica R's server dies when the weights of step N reach it
    lose-R-N           replica R's server holds the weights of step N, and loses their label
"""

import asyncio
import hashlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FOLDER = "STANDIN_FOLDER"
"""Environment variable: where the diary is, and where a test interferes."""


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return one hash of all tensors, by name, as float32."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(name.encode() + tensors[name].detach().float().contiguous().numpy().tobytes())
    return hashed.hexdigest()


class StandInServer:
    """One replica's server. `global_steps` labels the weights, as verl's servers do."""

    def __init__(self, model: str, mode: Any, replica: int, config: Any, profiler: Any, adapter: bool) -> None:
        self._folder, self._path = Path(os.environ[FOLDER]), model
        self.rollout_mode, self.replica_rank, self.node_rank, self.config = mode, replica, 0, config
        self.profiler_controller, self.lora_as_adapter = profiler, adapter
        self.global_steps: int | None = None
        self._submission_paused, self._asleep = False, set[str]()
        self._open = asyncio.Event()
        self._open.set()
        self._recorder: Any = None
        self._adapter: Any = None
        self._digest = ""

    async def launch_server(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self._path)).float().eval()
        requests: dict[str, object] = {}
        self.engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=requests))
        self._requests = requests

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        await self._open.wait()
        while (self._folder / f"hold-{self.global_steps}").exists():  # noqa: ASYNC110  # another process removes it
            await asyncio.sleep(0.05)
        assert not self._asleep, f"replica {self.replica_rank} was asked to generate while it sleeps"
        self._requests[request_id] = None
        try:
            tokens, probabilities = self._sample(list(prompt_ids), self.config.response_length)
        finally:
            del self._requests[request_id]
        self._note("generated", digest=self._digest)
        return TokenOutput(
            token_ids=tokens,
            log_probs=probabilities,
            stop_reason="completed",
            extra_fields={"global_steps": self.global_steps},
        )

    @torch.no_grad()
    def _sample(self, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
        sampled: list[int] = []
        probabilities: list[float] = []
        for _ in range(count):
            scores = self._model(torch.tensor([tokens + sampled])).logits[0, -1].log_softmax(-1)
            sampled.append(int(torch.multinomial(scores.exp(), 1)))
            probabilities.append(float(scores[sampled[-1]]))
        return sampled, probabilities

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        self._submission_paused = True
        self._open.clear()
        return {"aborted_count": 0, "request_ids": []}

    async def resume_generation(self) -> None:
        self._submission_paused = False
        self._open.set()

    async def wait_for_requests_to_drain(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    # --- memory and weights -------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        self._asleep = {"weights", "kv_cache"}
        if self._resolve_sleep_level() == 2:
            self._digest = ""

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._asleep -= set(tags or ["weights", "kv_cache"])

    async def release_kv_cache(self) -> None:
        self._asleep.add("kv_cache")

    async def resume_kv_cache(self) -> None:
        self._asleep.discard("kv_cache")

    async def load(
        self, tensors: dict[str, torch.Tensor], step: int | None, lora: dict[str, Any] | None = None
    ) -> None:
        """Take all tensors of the model, or of its adapter with the settings `lora`.

        Not of verl's servers, which are sent them through shared memory. Those too hold one adapter, and replace it.
        """
        if (self._folder / f"die-{self.replica_rank}-{step}").exists():
            os._exit(1)
        if lora is None:
            self._model.load_state_dict(tensors, strict=False)
        else:
            from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

            settings = LoraConfig(**{name: lora[name] for name in ("r", "lora_alpha", "target_modules")})
            self._adapter = self._adapter or get_peft_model(self._model, settings)  # inside of the model
            assert not set_peft_model_state_dict(self._adapter, tensors).unexpected_keys
        self._digest = digest(tensors)
        what = "loaded" if lora is None else "adapted"
        self._note(what, step=step, digest=self._digest, paused=self._submission_paused)

    async def set_global_steps(self, global_steps: int) -> None:
        if not (self._folder / f"lose-{self.replica_rank}-{global_steps}").exists():
            self.global_steps = global_steps

    def _resolve_sleep_level(self) -> int:
        return 1 if self.lora_as_adapter else 2

    # --- profiles -----------------------------------------------------------------------------------------------------

    def _should_profile(self) -> bool:
        controller = self.profiler_controller
        return bool(controller.check_enable() and controller.check_this_rank() and controller.is_discrete_mode())

    async def start_profile(self, **_: Any) -> None:
        if self._should_profile():
            assert self._recorder is None, "a second session was started in an engine that records"
            self._recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._recorder.start()

    async def stop_profile(self) -> None:
        if self._should_profile() and self._recorder is not None:  # vLLM ignores a stop without a session
            recorder, self._recorder = self._recorder, None
            recorder.stop()
            save_path = Path(self.profiler_controller.config.save_path)
            folder = save_path / f"agent_loop_rollout_replica_{self.replica_rank}"
            folder.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(folder / f"rank0.{time.time_ns()}.pt.trace.json.gz"))
            self._note("recorded", step=self.global_steps)

    def _note(self, what: str, **facts: object) -> None:
        line = {"what": what, "replica": self.replica_rank, "label": self.global_steps, **facts}
        with (self._folder / f"diary-{self.replica_rank}.jsonl").open("a") as diary:
            diary.write(json.dumps(line) + "\n")
