"""What each engine, as it was launched, is asked to record, and what it is never asked for because it can't."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas.commands import ProfileActivity, ProfilePlan, Window
from schemas.errors import UnsupportedError
from workers.engines.sglang.launch import read_launch as read_sglang
from workers.engines.sglang.profile import profile_arguments as sglang_arguments
from workers.engines.vllm.launch import read_launch as read_vllm
from workers.engines.vllm.profile import profile_arguments as vllm_arguments

BOUNDED = frozenset({"profile_prefix", "delay_iterations", "max_iterations"})
"""What a start takes from vLLM 0.32 on."""
IDENTIFIED = frozenset({"output_dir", "profile_id", "profile_prefix", "merge_profiles"})
"""Some of what a start takes from SGLang 0.5.15 on."""
TORCH = {"profiler": "torch", "torch_profiler_dir": "/traces"}


def on_vllm(
    plan: ProfilePlan, records: Mapping[str, object], *, device: str = "cuda", takes: frozenset[str] = BOUNDED
) -> dict[str, object]:
    """Return what a vLLM with this profiler is sent."""
    info = {"version": "0.x", "vllm_config": {"profiler_config": records, "device_config": {"device": device}}}
    methods = {"start_profile": takes, "stop_profile": frozenset[str]()}
    return vllm_arguments(plan, "step_1/replica_0", read_vllm(info, methods))


def on_sglang(
    plan: ProfilePlan, *, device: str = "cuda", version: str = "0.5.23", takes: frozenset[str] = IDENTIFIED
) -> dict[str, object]:
    """Return what an SGLang on this device is sent."""
    launch = read_sglang({"version": version, "device": device}, {"start_profile": takes})
    return sglang_arguments(plan, "step_1/replica_0", Path("/traces"), launch)


def activities(*names: ProfileActivity) -> ProfilePlan:
    return ProfilePlan(activities=frozenset(names))


# --- vLLM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "delay", "most"),
    [
        (None, 0, 0),
        (Window(0, 1), 0, 1),
        (Window(0, 7), 0, 7),
        (Window(1, 3), 2, 2),
        (Window(12, 46), 13, 34),
        (Window(3), 4, 0),
    ],
)
def test_vllm_delays_a_window_until_just_before_its_first_pass(window: Window | None, delay: int, most: int) -> None:
    sent = on_vllm(ProfilePlan(window=window), TORCH | {"delay_iterations": 5, "max_iterations": 5})
    assert sent == {"profile_prefix": "step_1.replica_0", "delay_iterations": delay, "max_iterations": most}


@pytest.mark.parametrize(("window", "delay", "most"), [(None, 0, 0), (Window(0, 2), 0, 2), (Window(3, 5), 4, 2)])
def test_vllm_up_to_0_31_records_the_window_that_it_was_launched_with_and_no_other(
    window: Window | None, delay: int, most: int
) -> None:
    records = TORCH | {"delay_iterations": delay, "max_iterations": most}
    assert on_vllm(ProfilePlan(window=window), records, takes=frozenset()) == {}
    for other in (None, Window(0, 2), Window(3, 5)):
        if other != window:
            with pytest.raises(UnsupportedError, match=r"Launch it with delay_iterations=\d and max_iterations=\d, or"):
                on_vllm(ProfilePlan(window=other), records, takes=frozenset())


@pytest.mark.parametrize(
    ("records", "plan", "why"),
    [
        ({}, ProfilePlan(), "launched without a torch profiler: add --profiler-config"),
        ({"profiler": "cuda"}, ProfilePlan(), "launched without a torch profiler: add --profiler-config"),
        (TORCH | {"torch_profiler_with_stack": False}, ProfilePlan(with_stack=True), "stacks: launch it with"),
        (TORCH | {"torch_profiler_with_stack": False}, ProfilePlan(with_modules=True), "which stacks name: launch it"),
        (TORCH | {"torch_profiler_record_shapes": False}, ProfilePlan(record_shapes=True), "shapes: launch it with"),
        (TORCH | {"torch_profiler_with_memory": False}, activities("cpu", "memory"), "memory: launch it with"),
        (TORCH | {"torch_profiler_activities": ["CPU"]}, activities("cuda"), "activities that have CUDA"),
        (TORCH | {"torch_profiler_activities": ["CUDA"]}, activities("cpu"), "activities that have CPU"),
        (TORCH | {"ignore_frontend": False}, ProfilePlan(), "Launch it with ignore_frontend"),
        (TORCH | {"warmup_iterations": 2}, ProfilePlan(), "launch it without wait_iterations and warmup_iterations"),
        (TORCH, ProfilePlan(by_stage=True), "vLLM writes neither. Change the plan"),
        (TORCH, ProfilePlan(merge=True), "vLLM writes neither. Change the plan"),
        (TORCH, ProfilePlan(tool="npu"), "an NPU's work: its device is cuda"),
    ],
)
def test_vllm_is_not_asked_for_what_it_was_not_launched_for(
    records: Mapping[str, object], plan: ProfilePlan, why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        on_vllm(plan, records)


@pytest.mark.parametrize(("device", "activity"), [("cuda", "cuda"), ("npu", "npu"), ("cpu", "cpu")])
def test_vllm_records_what_its_device_does(device: str, activity: ProfileActivity) -> None:
    on_vllm(activities("cpu", activity), TORCH, device=device)


# --- SGLang -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "options", "sent"),
    [
        (ProfilePlan(), {}, {"activities": ["CPU"], "with_stack": False, "record_shapes": False}),
        (ProfilePlan(with_modules=True), {}, {"with_stack": True}),
        (activities("cpu", "cuda", "memory"), {}, {"activities": ["CPU", "GPU", "MEM"]}),
        (activities("cpu", "npu"), {"device": "npu"}, {"activities": ["CPU", "GPU"]}),
        (ProfilePlan(window=Window(0, 3)), {}, {"num_steps": 3}),
        (ProfilePlan(window=Window(0)), {}, {"activities": ["CPU"]}),
        (ProfilePlan(window=Window(0, 3)), {"version": "0.5.9"}, {"num_steps": 4}),
        (ProfilePlan(window=Window(0, 3), by_stage=True), {"version": "0.5.9"}, {"num_steps": 3}),
        (ProfilePlan(), {"takes": frozenset({"profile_prefix"})}, {"profile_prefix": "step_1.replica_0"}),
        (ProfilePlan(merge=True), {}, {"merge_profiles": True, "profile_id": "step_1.replica_0"}),
    ],
)
def test_sglang_gets_the_plan_in_its_own_terms(
    plan: ProfilePlan, options: dict[str, Any], sent: dict[str, object]
) -> None:
    found = on_sglang(plan, **options)
    assert found["output_dir"] == "/traces/step_1/replica_0"
    assert {key: found[key] for key in sent} == sent
    assert "start_step" not in found  # it counts from the launch, and one that is armed stays armed


@pytest.mark.parametrize(
    ("plan", "options", "why"),
    [
        (activities("cpu", "cuda"), {"device": "cpu"}, "cuda: its device is cpu. Change the plan"),
        (activities("cpu", "memory"), {"device": "cpu"}, "memory: its device is cpu"),
        (activities("cpu", "memory"), {"device": "npu"}, "memory: its device is npu"),
        (activities("cpu", "npu"), {}, "npu: its device is cuda"),
        (ProfilePlan(tool="npu"), {}, "with tool npu: its device is cuda"),
        (activities(), {}, "name at least one activity"),
        (ProfilePlan(window=Window(1, 3)), {}, "Begin the window at 0"),
        (ProfilePlan(window=Window(2)), {}, "Begin the window at 0"),
        (ProfilePlan(by_stage=True), {}, "by stage without a window"),
        (ProfilePlan(by_stage=True, window=Window(0)), {}, "by stage without a window"),
        (ProfilePlan(merge=True), {"takes": frozenset({"profile_prefix"})}, "a merged trace"),
    ],
)
def test_sglang_is_not_asked_for_what_it_cannot_record(plan: ProfilePlan, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        on_sglang(plan, **options)
