"""What the gateway makes of a trainer's posts, without sockets: its table of routes, and which of them are one sync."""

import io
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread
from anyio.abc import TaskGroup

from controlplane.trainers.gateway import routes
from controlplane.trainers.gateway.adapters import adapter_of, copy_adapter
from controlplane.trainers.gateway.posts import Answer, Posts, status_of_sync
from controlplane.trainers.gateway.routes import (
    AdapterPost,
    CheckPost,
    DeltaPost,
    PausePost,
    Plain,
    RefusedPost,
    SyncPost,
    TransferPost,
    UpdatePost,
    VersionPost,
    is_passed,
    read_request,
)
from schemas.commands import Checkpoint, EngineCommand, WeightSync
from schemas.desired import Desired
from schemas.errors import CheckpointError
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing
from schemas.reports import AgentOutcome, Report, SyncReport
from tests.waiting import until

ROOTS = ("/data/run", "/mnt/disk/run")


@pytest.mark.parametrize(
    ("route", "fields", "meaning"),
    [
        ("/pause", {"mode": "keep", "clear_cache": "false"}, PausePost("keep")),
        ("/pause", {}, PausePost("abort")),
        ("/pause_generation", {}, PausePost("abort")),
        ("/pause_generation", {"mode": "retract"}, PausePost("keep")),
        ("/areal_pause_generation", {}, PausePost("abort")),
        ("/resume", {}, Plain.RESUME),
        ("/continue_generation", {}, Plain.RESUME),
        ("/areal_continue_generation", {}, Plain.RESUME),
        ("/reset_prefix_cache", {"reset_running_requests": True}, Plain.FLUSH),
        ("/update_weights", {"weight_dir": "/data/run/step_5"}, UpdatePost("step_5")),
        ("/update_weights", {"update_info": {"target_version": 7, "sync_dir": "s3://b"}}, DeltaPost("7")),
        (
            "/update_weights_from_disk",
            {"model_path": "/mnt/disk/run/a/weight_v000003", "weight_version": "3"},
            UpdatePost("a/weight_v000003", "3"),
        ),
        ("/update_weights_from_disk", {"model_path": "/data/run/w", "abort_all_requests": True}, UpdatePost("w")),
        ("/areal_update_weights", {"model_path": "/data/run/w"}, UpdatePost("w")),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"local_checkpoint_dir": "/data/run/local"}},
            TransferPost("local/weights"),
        ),
        ("/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": {}}, Plain.PART),
        ("/collective_rpc", {"method": "skyrl_finish_weight_update"}, Plain.PART),
        ("/start_weight_update", {}, Plain.PART),
        ("/finish_weight_update", {"weight_version": "7"}, Plain.PART),
        ("/collective_rpc", {"method": "liveness_probe", "args": [], "kwargs": {}}, Plain.PART),
        ("/collective_rpc", {"method": "update_weights_from_path", "args": ["/data/run/step_5"]}, UpdatePost("step_5")),
        ("/update_weight_version", {"new_version": "7", "abort_all_requests": False}, VersionPost("7")),
        ("/weights_checker", {"action": "compare", "selector": "all"}, CheckPost("compare")),
        ("/v1/rl/syncs", {"model_path": "/data/run/w", "weight_version": 7}, SyncPost(UpdatePost("w", "7"), "abort")),
        ("/v1/rl/syncs", {"model_path": "/data/run/w", "mode": "keep"}, SyncPost(UpdatePost("w"), "keep")),
        (
            "/v1/rl/syncs",
            {"model_path": "/data/run/w", "quorum": 2, "absent": "wait"},
            SyncPost(UpdatePost("w"), "abort", {"quorum": 2, "on_unreachable": "wait"}),
        ),
        ("/load_lora_adapter", {"lora_name": "r16-a32.0", "lora_path": "/data/run/a"}, AdapterPost("r16-a32.0", "a")),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "lora-v3", "lora_path": "/mnt/disk/run/w/v3", "load_inplace": True},
            AdapterPost("lora-v3", "w/v3"),
        ),
        ("/skyrl/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/data/run/b"}, AdapterPost("a", "b")),
        ("/unload_lora_adapter", {"lora_name": "lora-v1"}, AdapterPost("lora-v1")),
        ("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 1}, AdapterPost("a")),
    ],
)
def test_a_post_means_one_thing(route: str, fields: dict[str, Any], meaning: routes.Meaning) -> None:
    assert read_request("POST", route, fields, ROOTS) == meaning


@pytest.mark.parametrize(
    ("route", "fields", "says"),
    [
        ("/update_weights", {"weight_dir": None}, 'weight_broadcast type to "filesystem"'),
        ("/update_weights", {"update_info": {"names": ["a"]}}, "weight_sync_backend=delta"),
        ("/update_weights", {}, "no model_path or weight_dir"),
        ("/update_weights", {"weight_dir": "outputs/step_5"}, "relative to the trainer's working directory"),
        ("/update_weights", {"weight_dir": "/data/other/step_5"}, "is not below /data/run"),
        ("/update_weights", {"weight_dir": "/data/run"}, "is not below /data/run"),
        ("/update_weights", {"weight_dir": "/data/run/../../etc"}, "holds `..`"),
        ("/update_weights_from_disk", {"model_path": "/data/run/a", "load_format": "flash_rl"}, "load_format"),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 1}}, "NCCL"),
        ("/collective_rpc", {"method": "update_weights_nccl"}, "skyrl_finish_weight_update"),
        ("/collective_rpc", {"method": "update_weights_from_path", "args": [None]}, 'type to "filesystem"'),
        ("/collective_rpc", {"method": "update_weights_from_path", "args": "/data/run/a"}, "with a path is allowed"),
        ("/collective_rpc", {"method": "update_weights_from_path", "args": ["/etc"]}, "is not below /data/run"),
        ("/update_weight_version", {"new_version": "a\nb"}, "may be one line"),
        ("/weights_checker", {"action": "checksum"}, "must be snapshot, reset_tensors or compare"),
        ("/weights_checker", {"action": ["compare"]}, "must be snapshot"),
        ("/v1/rl/syncs", {"weight_version": "7"}, "no model_path"),
        ("/v1/rl/syncs", {"model_path": "/data/run/w", "mode": 7}, "abort, wait, keep"),
        ("/v1/rl/syncs", {"model_path": "/data/run/w", "quorum": 0}, "quorum is 0"),
        (
            "/v1/rl/syncs",
            {"model_path": "/data/run/w", "absent": "never"},
            "absent is 'never', and must be skip or wait",
        ),
        ("/pause", {"mode": "whatever"}, "abort, wait, keep"),
        ("/start_profile", {}, "rolloutctl profile start"),
        ("/update_weights_from_distributed", {}, "NCCL"),
        ("/init_broadcaster", {}, "NCCL"),
        ("/start_draft_weight_update", {}, "not the drafter"),
        ("/begin_weight_update", {"selector": "all"}, "NCCL"),
        ("/load_lora_adapter", {"lora_name": "a"}, "no lora_path names a directory"),
        ("/skyrl/v1/load_lora_adapter", {"lora_name": "a", "in_memory": True}, "lora.sync_mode=disk"),
        ("/load_lora_adapter", {"lora_name": "org/a", "lora_path": "/data/run/a"}, "must be up to 100 letters"),
        ("/load_lora_adapter", {"lora_name": 7, "lora_path": "/data/run/a"}, "lora_name is 7"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/data/other/a"}, "is not below /data/run"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/data/run/a", "pinned": True}, "pinned is set"),
        ("/load_lora_adapter_from_tensors", {"lora_name": "miles_lora"}, "an adapter in memory"),
        ("/areal_update_weights_lora_xccl", {"lora_name": "lora-v3"}, "weight_update_mode=disk"),
        ("/release_memory_occupation", {}, "memory"),
        ("/shutdown", {}, "does not know this route"),
        ("/v1/models", {}, "does not know this route"),
    ],
)
def test_what_no_command_can_stand_for_is_refused_with_what_to_do(
    route: str, fields: dict[str, Any], says: str
) -> None:
    refused = read_request("POST", route, fields, ROOTS)
    assert isinstance(refused, RefusedPost)
    assert says in refused.message and f"POST {route} is refused" in refused.message


def test_only_listed_routes_go_to_the_engine_and_none_of_them_changes_it() -> None:
    assert is_passed("POST", "/generate") == "tokens"
    assert is_passed("GET", "/v1/models") == "other"
    for verb, route in (("POST", "/pause"), ("GET", "/generate"), ("POST", "/update_weights"), ("POST", "/../pause")):
        assert is_passed(verb, route) is None
    assert not routes.CONTROL.keys() & (routes.GENERATION | routes.PASSED)
    assert not routes.REFUSED.keys() & {route for _, route in {*routes.CONTROL, *routes.GENERATION, *routes.PASSED}}


# --- what follows from it ---------------------------------------------------------------------------------------------

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]
A, B = UpdatePost("a", "1"), UpdatePost("b", "2")


REFUSED = Failed(ErrorKind.SOURCE_REFUSED, "it is another model")


def sync_report(*loads: Conclusion, status: str = "aborted", version: int = 1) -> SyncReport:
    """The report of a sync, with the conclusions of replica 0, 1 … at its load."""
    outcomes = tuple(AgentOutcome(agent=f"{n}.0", conclusion=conclusion) for n, conclusion in enumerate(loads))
    command = WeightSync(phase="load", version=version)
    phase = Report(seq=1, origin=1, command=command, outcomes=outcomes)
    loaded = (0, 1) if status == "committed" else ()
    return SyncReport(version=version, status=status, loaded=loaded, quarantined=(), phases=(phase,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("conclusions", "status"),
    [
        ([], 503),  # no agent has joined yet
        ([Acted(calls=()), Missing("absent")], 503),
        ([Missing("restarted"), Missing("engine_down"), Failed(ErrorKind.ENGINE_NOT_READY, "")], 503),
        ([Missing("gone"), REFUSED], 409),
        ([Missing("deadline")], 409),  # its engine may hang for ever
    ],
)
def test_only_causes_that_pass_by_themselves_are_worth_another_attempt(
    conclusions: list[Conclusion], status: int
) -> None:
    assert status_of_sync(sync_report(*conclusions)) == status


class Plane:
    """The control plane of two replicas. A sync ends as, and when, a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # path and in_flight of each sync
        self.commands: list[tuple[str, list[int]]] = []
        self.has_committed = False
        self._ends, self._status = anyio.Event(), "committed"
        self.limits: dict[str, Any] = {}

    def view(self) -> Any:
        joined = {f"{replica}.0": SimpleNamespace(joined=True) for replica in range(3)}
        return SimpleNamespace(
            state=SimpleNamespace(
                members=joined, retired={}, adapters={}, syncs={}, run="run", default_desired=Desired()
            ),
            has_committed=self.has_committed,
        )

    def sync_weights(self, _: None, source: Checkpoint, *, in_flight: str, **limits: Any) -> Any:
        self.asked.append((source.path, in_flight))
        self.limits = limits
        return self._report()

    async def _report(self) -> SyncReport:
        await self._ends.wait()
        self._ends, status = anyio.Event(), self._status
        return sync_report(*([REFUSED] if status == "aborted" else []), status=status, version=len(self.asked))

    def sync_adapter(self, name: str, _: None, path: str, *, timeout: float) -> Any:
        self.asked.append((name, path.partition(".")[0]))
        return self._report()

    def drop_adapter(self, name: str) -> Any:
        self.asked.append((name, "dropped"))
        return self._report()

    def end(self, status: str) -> None:
        self._status = status
        self._ends.set()

    async def publish(self, command: EngineCommand, replicas: list[int]) -> Report:
        self.commands.append((command.operation, replicas))
        outcomes = tuple(AgentOutcome(agent=f"{replica}.0", conclusion=Acted(calls=())) for replica in replicas)
        return Report(seq=1, origin=1, command=command, outcomes=outcomes)


class Trainer:
    """Posts, each in a task of its own."""

    def __init__(self, folder: Path, tasks: TaskGroup, replicas: int, moment_s: float) -> None:
        self.plane, self.folder, self.tasks = Plane(), folder, tasks
        self.posts = Posts(self.plane, replicas, folder, moment_s, {"timeout": 60.0})  # type: ignore[arg-type]

    def write(self, name: str, text: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        for file in ("model.safetensors", "adapter_model.safetensors", "adapter_config.json"):
            (self.folder / name / file).write_text(text)

    async def post(self, replica: int, meaning: routes.Meaning, *, gone: bool = False) -> list[Answer]:
        """Post, and let all that it begins go as far as it gets. Returns its answer, once that is there."""
        answers: list[Answer] = []

        async def run() -> None:
            async def is_disconnected() -> bool:
                return gone

            answers.append(await self.posts.answer(replica, meaning, is_disconnected))

        self.tasks.start_soon(run)
        await settled()
        return answers

    async def end(self, status: str = "committed") -> None:
        self.plane.end(status)
        await settled()


async def settled() -> None:
    """Until nothing goes on: files are looked at, and syncs asked for, in threads."""
    threads = to_thread.current_default_thread_limiter()
    while True:
        await anyio.wait_all_tasks_blocked()
        if not threads.borrowed_tokens:
            return
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def trainer(folder: Path, replicas: int = 2, moment_s: float = 3600.0) -> AsyncIterator[Trainer]:
    async with anyio.create_task_group() as tasks:
        made = Trainer(folder, tasks, replicas, moment_s)
        tasks.start_soon(made.posts.serve)
        await settled()
        yield made
        tasks.cancel_scope.cancel()


async def test_a_set_of_posts_is_one_sync_and_one_answer(tmp_path: Path) -> None:
    async with trainer(tmp_path) as one:
        first = await one.post(0, A)
        assert one.plane.asked == []
        second = await one.post(1, A)
        assert one.plane.asked == [("a", "abort")]
        late = await one.post(1, A)  # its first attempt timed out
        assert first == second == late == []
        await one.end("aborted")
        assert first[0][0] == 409 and first == second == late and len(one.plane.asked) == 1


async def test_a_request_for_the_fleet_may_have_limits_of_its_own_for_that_sync_alone(tmp_path: Path) -> None:
    async with trainer(tmp_path) as one:

        async def connected() -> bool:
            return False

        post = SyncPost(A, "keep", {"quorum": 1, "on_unreachable": "wait"})
        one.tasks.start_soon(one.posts.sync, post, connected)
        await settled()
        assert one.plane.limits == {"timeout": 60.0, "quorum": 1, "on_unreachable": "wait"}
        await one.end()
        one.tasks.start_soon(one.posts.sync, SyncPost(B, "keep"), connected)
        await settled()
        assert one.plane.limits == {"timeout": 60.0}


async def test_after_a_moment_the_whole_fleet_is_synced_even_if_one_was_not_asked(tmp_path: Path) -> None:
    async with trainer(tmp_path, 3, moment_s=0.0) as one:
        asked = await one.post(2, A)
        assert one.plane.asked == [("a", "abort")]
        await one.end()
        assert await one.post(0, A) == asked and asked[0][0] == 200 and len(one.plane.asked) == 1


async def test_an_answer_that_never_arrived_is_given_again_and_one_that_did_is_not(tmp_path: Path) -> None:
    async with trainer(tmp_path) as one:
        lost, arrived = await one.post(0, A, gone=True), await one.post(1, A)
        await one.end()
        assert await one.post(0, A) == lost == arrived
        assert await one.post(0, A) == [] and len(one.plane.asked) == 1  # waits for those of the other replica


async def test_other_weights_for_another_replica_refuse_the_whole_set(tmp_path: Path) -> None:
    async with trainer(tmp_path) as one:
        first = await one.post(0, A)
        ((status, message),) = await one.post(1, B)
        assert first == [(status, message)] and status == 409 and "moves together" in message
        assert await one.post(0, A) == [] == one.plane.asked
        await one.post(1, A)
        assert one.plane.asked == [("a", "abort")]


async def test_other_weights_during_a_sync_are_refused_and_the_sync_goes_on(tmp_path: Path) -> None:
    async with trainer(tmp_path, 1) as one:
        first = await one.post(0, A)
        ((status, message),) = await one.post(0, B)
        assert status == 503 and "ask again when it has ended" in message
        await one.end()
        assert first[0][0] == 200


async def test_an_answer_belongs_to_the_files_and_not_to_their_path(tmp_path: Path) -> None:
    async with trainer(tmp_path, 1) as one:
        one.write("a", "first")
        await one.post(0, A, gone=True)
        await one.end()
        one.write("a", "the other")
        await one.post(0, A)
        assert len(one.plane.asked) == 2
        one.write("a", "the third one")
        ((status, message),) = await one.post(0, A)
        assert status == 503 and "a, which was written again" in message


async def test_files_that_change_before_the_sync_begins_are_those_that_it_loads(tmp_path: Path) -> None:
    async with trainer(tmp_path) as one:
        one.write("a", "first")
        await one.post(0, A, gone=True)
        one.write("a", "the newest")
        await one.post(1, A)
        await one.end()
        assert len(await one.post(0, A)) == 1 == len(one.plane.asked)


async def test_a_pause_is_acknowledged_and_its_mode_is_that_of_all_syncs_until_one_commits(tmp_path: Path) -> None:
    async with trainer(tmp_path, 1) as one:
        assert await one.post(0, PausePost("keep")) and await one.post(0, Plain.FLUSH)
        for status in ("aborted", "committed"):  # prime-rl asks again within its pause
            await one.post(0, A)
            await one.end(status)
        assert one.plane.asked == [("a", "keep")] * 2
        assert await one.post(0, Plain.RESUME) and await one.post(0, Plain.RESUME)
        assert one.plane.commands == []


async def test_of_several_pauses_the_strongest_is_that_of_the_sync_until_a_resume(tmp_path: Path) -> None:
    """AReaL aborts what runs, and then holds the scheduler: what it aborts must not run on."""
    async with trainer(tmp_path) as one:
        for replica in (0, 1):
            await one.post(replica, PausePost("abort"))
            await one.post(replica, PausePost("keep"))
        for weights in (A, B):
            await one.post(0, weights)
            await one.post(1, weights)
            await one.end()
            await one.post(0, PausePost("wait"))
            await one.post(0, Plain.RESUME)
            await one.post(0, PausePost("keep"))
            await one.post(1, PausePost("wait"))
        assert one.plane.asked == [("a", "abort"), ("b", "wait")]


async def test_a_resume_or_a_flush_without_an_update_is_a_command(tmp_path: Path) -> None:
    async with trainer(tmp_path) as one:
        assert (await one.post(1, Plain.FLUSH))[0][0] == 200
        await one.post(0, A)
        await one.post(1, A)
        await one.end()
        await one.post(1, PausePost())
        assert (await one.post(1, Plain.RESUME))[0][0] == 200
        assert one.plane.commands == [("flush", [1]), ("resume", [1])]


async def test_deltas_need_the_folder_that_the_trainer_names_at_its_start(tmp_path: Path) -> None:
    async with trainer(tmp_path, 1) as one:
        ((status, message),) = await one.post(0, DeltaPost("1"))
        assert status == 409 and "Start the trainer again" in message
        one.posts.local = "local"
        ((status, message),) = await one.post(0, DeltaPost("1"))
        assert status == 200 and "no weight has changed" in message
        one.write("local", "patched")
        await one.post(0, DeltaPost("2"))
        assert one.plane.asked == [("local", "abort")]


async def test_what_still_waits_when_the_gateway_ends_is_answered_503(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks, trainer(tmp_path) as one:
        one.tasks = tasks  # posts that outlive it
        waiting = await one.post(0, A)
    assert waiting == [(503, "the gateway ends")]


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_a_name_with_a_version_is_one_of_its_adapter() -> None:
    names = {"policy": "policy", "policy-v7": "policy", "r16-a32.0": "r16-a32.0", "a-vb": "a-vb", "-v7": "-v7"}
    assert {name: adapter_of(name) for name in names} == names


async def test_posts_of_adapters_and_of_weights_are_sets_of_their_own_at_the_same_time(tmp_path: Path) -> None:
    async with trainer(tmp_path) as one:
        one.write("one", "1")
        one.write("two", "2")
        kinds = (A, AdapterPost("policy-v1", "one"), AdapterPost("judge", "two"))
        answers = [await one.post(replica, meaning) for replica in (0, 1) for meaning in kinds]
        copy = "gateway-adapters/run/"
        assert one.plane.asked == [("a", "abort"), ("policy", f"{copy}policy-v1"), ("judge", f"{copy}judge")]
        ((status, message),) = await one.post(0, AdapterPost("policy-v2", "two"))
        assert status == 503 and "ask again when it has ended" in message
        await one.end()
        assert [answer[0][0] for answer in answers] == [200] * 6 and len(one.plane.asked) == 3


async def test_a_set_of_unloads_is_one_drop(tmp_path: Path) -> None:
    async with trainer(tmp_path) as one:
        first, second = await one.post(0, AdapterPost("policy")), await one.post(1, AdapterPost("policy"))
        await one.end()
        assert one.plane.asked == [("policy", "dropped")] and first == second and first[0][0] == 200
        assert (await one.post(0, AdapterPost("policy-v3")))[0][0] == 200  # the run unloads old versions by itself
        assert len(one.plane.asked) == 1


async def test_a_pause_around_a_load_of_an_adapter_is_no_command(tmp_path: Path) -> None:
    async with trainer(tmp_path, 1) as one:
        one.write("one", "1")
        await one.post(0, PausePost())
        await one.post(0, AdapterPost("policy-v1", "one"))
        await one.end()
        assert (await one.post(0, Plain.RESUME))[0][0] == 200 and one.plane.commands == []
        await one.post(0, AdapterPost("policy-v2", "one"))
        assert (await one.post(0, Plain.FLUSH))[0][0] == 200 and one.plane.commands == [("flush", [0])]


async def test_copies_that_no_version_has_are_deleted(tmp_path: Path) -> None:
    left = tmp_path / "gateway-adapters/run/policy.00"
    left.mkdir(parents=True)
    other = tmp_path / "gateway-adapters/another-run/policy.00"
    other.mkdir(parents=True)
    async with trainer(tmp_path):
        await until(lambda: not left.exists())
    assert other.exists()


def test_an_adapter_that_is_written_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "a" / file).write_text("first")

    def copy(original: io.FileIO, to: io.BufferedWriter, _: int) -> None:
        to.write(original.read())
        (tmp_path / "a/adapter_model.safetensors").write_text("the second")

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(CheckpointError, match="was written while it was copied"):
        copy_adapter(tmp_path, "a", "b")


@pytest.mark.parametrize("links", ["a", "a/adapter_config.json"])
def test_a_link_that_leads_out_of_the_root_is_not_copied(tmp_path: Path, links: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    for folder in (outside, root / "a"):
        folder.mkdir(parents=True)
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            (folder / file).write_text("x")
    if links == "a":
        shutil.rmtree(root / "a")
        (root / "a").symlink_to(outside)
    else:
        (root / links).unlink()
        (root / links).symlink_to(outside / "adapter_config.json")
    with pytest.raises(CheckpointError, match="outside"):
        copy_adapter(root, "a", "b")
    assert not (root / "b").exists()
