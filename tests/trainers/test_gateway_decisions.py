"""What the gateway makes of a trainer's posts, without sockets: its table of routes, and its machine."""

from typing import Any

import pytest

from controlplane.trainers.gateway import routes
from controlplane.trainers.gateway.routes import (
    DeltaPost,
    FlushPost,
    PartPost,
    PausePost,
    RefusedPost,
    ResumePost,
    StartProfilePost,
    StopProfilePost,
    TransferPost,
    UpdatePost,
    is_passed,
    read_request,
)
from controlplane.trainers.gateway.updates import (
    AnswerSent,
    BeginSync,
    CommandReplica,
    GatewayState,
    MomentPassed,
    PostArrived,
    Remind,
    Reply,
    SyncEnded,
    decide,
)
from schemas.commands import EngineCommand, ProfileCommand, ProfilePlan, Window

ROOTS = ("/data/run", "/mnt/disk/run")


@pytest.mark.parametrize(
    ("route", "fields", "meaning"),
    [
        ("/pause", {"mode": "keep", "clear_cache": "false"}, PausePost("keep")),
        ("/pause", {}, PausePost("abort")),
        ("/pause_generation", {}, PausePost("abort")),
        ("/pause_generation", {"mode": "retract"}, PausePost("keep")),
        ("/areal_pause_generation", {}, PausePost("abort")),
        ("/resume", {}, ResumePost()),
        ("/continue_generation", {}, ResumePost()),
        ("/areal_continue_generation", {}, ResumePost()),
        ("/reset_prefix_cache", {"reset_running_requests": True}, FlushPost()),
        ("/update_weights", {"weight_dir": "/data/run/step_5"}, UpdatePost("step_5")),
        ("/update_weights", {"update_info": {"target_version": 7, "sync_dir": "s3://b"}}, DeltaPost("7")),
        (
            "/update_weights_from_disk",
            {"model_path": "/mnt/disk/run/a/weight_v000003", "weight_version": "3"},
            UpdatePost("a/weight_v000003", "3"),
        ),
        (
            "/update_weights_from_disk",
            {"model_path": "/data/run/w", "abort_all_requests": True},
            UpdatePost("w"),
        ),
        ("/areal_update_weights", {"model_path": "/data/run/w"}, UpdatePost("w")),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"local_checkpoint_dir": "/data/run/local"}},
            TransferPost("local/weights"),
        ),
        ("/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": {}}, PartPost()),
        ("/collective_rpc", {"method": "skyrl_finish_weight_update"}, PartPost()),
        ("/stop_profile", {}, StopProfilePost()),
        (
            "/start_profile",
            {
                "output_dir": "/tmp/x",
                "num_steps": 3,
                "start_step": None,
                "activities": ["GPU"],
                "profile_by_stage": False,
                "with_stack": True,
                "record_shapes": None,
            },
            StartProfilePost(ProfilePlan(window=Window(0, 3), activities=frozenset({"cuda"}), with_stack=True)),
        ),
        ("/start_profile", {}, StartProfilePost(ProfilePlan(activities=frozenset({"cpu", "cuda"})))),
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
        ("/pause", {"mode": "whatever"}, "abort, wait, keep"),
        ("/start_profile", {"num_steps": 0.5}, "positive number"),
        ("/start_profile", {"start_step": 4}, "counts from the launch"),
        ("/start_profile", {"activities": ["TPU"]}, "CPU, GPU"),
        ("/start_profile", {"merge_profiles": True}, "merge_profiles can't be set"),
        ("/update_weights_from_distributed", {}, "NCCL"),
        ("/init_broadcaster", {}, "NCCL"),
        ("/load_lora_adapter", {"lora_name": "a"}, "adapter"),
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
    assert is_passed("POST", "/generate") == routes.Passed(generates=True)
    assert is_passed("GET", "/server_info") == routes.Passed()
    for verb, route in (("POST", "/pause"), ("GET", "/generate"), ("POST", "/update_weights"), ("POST", "/../pause")):
        assert is_passed(verb, route) is None
    assert not routes.CONTROL.keys() & (routes.GENERATION | routes.PASSED)
    assert not routes.REFUSED.keys() & {route for _, route in {*routes.CONTROL, *routes.GENERATION, *routes.PASSED}}


# --- the machine ------------------------------------------------------------------------------------------------------


class Machine:
    """Gives events, and keeps what is to be done."""

    def __init__(self, replicas: int = 2) -> None:
        self.state = GatewayState(replicas=replicas)
        self.posts = 0

    def post(self, replica: int, meaning: routes.Meaning, **more: Any) -> tuple[int, list[Any]]:
        self.posts += 1
        return self.posts, self.event(PostArrived(post=self.posts, replica=replica, meaning=meaning, **more))

    def event(self, event: Any) -> list[Any]:
        self.state, actions = decide(self.state, event)
        return list(actions)

    def committed(self, *replicas: int, weights: UpdatePost) -> None:
        """A sync from its posts to answers that arrived."""
        posts = [self.post(replica, weights)[0] for replica in replicas]
        self.event(SyncEnded(number=self.state.number, status=200, message="v1 committed"))
        for post in posts:
            self.event(AnswerSent(post, True))


A, B = UpdatePost("a", "1"), UpdatePost("b", "2")


def test_a_set_of_posts_is_one_sync_and_one_answer() -> None:
    machine = Machine()
    first, actions = machine.post(0, A)
    assert actions == [Remind(1)]
    second, actions = machine.post(1, A)
    assert actions == [BeginSync(number=1, path="a", label="1", in_flight="abort")]
    assert machine.event(MomentPassed(1)) == []
    late, actions = machine.post(1, A)  # its first attempt timed out
    assert actions == []
    ended = SyncEnded(number=1, status=409, message="aborted")
    assert machine.event(ended) == [Reply((first, second, late), 409, "aborted")]
    assert machine.event(ended) == []


def test_after_a_moment_the_whole_fleet_is_synced_even_if_one_was_not_asked() -> None:
    machine = Machine(3)
    machine.post(2, A)
    assert machine.event(MomentPassed(1)) == [BeginSync(number=1, path="a", label="1", in_flight="abort")]
    assert machine.event(MomentPassed(1)) == []
    machine.event(SyncEnded(number=1, status=200, message="committed"))
    late, actions = machine.post(0, A)
    assert actions == [Reply((late,), 200, "committed")]


def test_an_answer_that_never_arrived_is_given_again_and_one_that_did_is_not() -> None:
    machine = Machine()
    lost, arrived = machine.post(0, A)[0], machine.post(1, A)[0]
    machine.event(SyncEnded(number=1, status=200, message="committed"))
    machine.event(AnswerSent(lost, False))
    machine.event(AnswerSent(arrived, True))
    again, actions = machine.post(0, A)
    assert actions == [Reply((again,), 200, "committed")]
    machine.event(AnswerSent(again, True))
    assert machine.post(0, A)[1] == [Remind(2)]


def test_other_weights_for_another_replica_refuse_the_whole_set() -> None:
    machine = Machine()
    first, _ = machine.post(0, A)
    second, (reply,) = machine.post(1, B)
    assert (reply.posts, reply.status) == ((first, second), 409) and "moves together" in reply.message
    assert machine.event(MomentPassed(1)) == []
    assert machine.post(0, A)[1] == [Remind(2)]


def test_other_weights_during_a_sync_are_refused_and_the_sync_goes_on() -> None:
    machine = Machine(1)
    first, _ = machine.post(0, A)
    other, (reply,) = machine.post(0, B)
    assert (reply.posts, reply.status) == ((other,), 409)
    assert machine.event(SyncEnded(number=1, status=200, message="ok")) == [Reply((first,), 200, "ok")]


def test_a_pause_is_acknowledged_and_its_mode_is_that_of_the_sync() -> None:
    machine = Machine(1)
    assert isinstance(machine.post(0, PausePost("keep"))[1][0], Reply)
    assert isinstance(machine.post(0, FlushPost())[1][0], Reply)
    (begin,) = machine.post(0, A)[1]
    assert begin.in_flight == "keep"
    machine.event(SyncEnded(number=1, status=200, message="ok"))
    assert isinstance(machine.post(0, ResumePost())[1][0], Reply)
    assert isinstance(machine.post(0, ResumePost())[1][0], Reply)


def test_a_resume_or_a_flush_without_an_update_is_a_command() -> None:
    machine = Machine()
    post, actions = machine.post(1, FlushPost())
    assert actions == [CommandReplica(post, 1, EngineCommand(operation="flush"))]
    machine.committed(0, 1, weights=A)
    machine.post(1, PausePost())
    post, actions = machine.post(1, ResumePost())
    assert actions == [CommandReplica(post, 1, EngineCommand(operation="resume"))]


def test_replicas_that_are_profiled_one_after_the_other_share_a_step_of_the_run() -> None:
    machine, plan = Machine(), ProfilePlan()
    start = StartProfilePost(plan)

    def step(replica: int, seq: int) -> int:
        (action,) = machine.post(replica, start, seq=seq)[1]
        assert action.command == ProfileCommand(action="start", step=action.command.step, plan=plan)
        return int(action.command.step)

    assert [step(0, 7), step(1, 8)] == [8, 8]
    assert [step(1, 9), step(0, 10)] == [10, 10]
    (stop,) = machine.post(0, StopProfilePost())[1]
    assert stop.command == ProfileCommand(action="stop", step=10)
    (refused,) = Machine().post(0, StopProfilePost())[1]
    assert refused.status == 400


def test_deltas_need_the_folder_that_the_trainer_names_at_its_start() -> None:
    machine = Machine(1)
    (reply,) = machine.post(0, DeltaPost("1"))[1]
    assert reply.status == 409 and "Start the trainer again" in reply.message
    assert machine.post(0, TransferPost("local/weights"))[1] == []
    (reply,) = machine.post(0, DeltaPost("1"), unchanged=True)[1]
    assert reply.status == 200 and "no weight has changed" in reply.message
    (begin,) = machine.post(0, DeltaPost("2"))[1]
    assert (begin.path, begin.label) == ("local/weights", "2")
