"""The command line of a launched server: missing options of the node's place are added."""

import json
from pathlib import Path

import pytest

from schemas.commands import ProfilePlan
from schemas.errors import ConfigError
from schemas.identity import Identity
from workers.server.command import Kind, lacks_peer, profiled_command, server_command, with_peer

MEET = "10.0.0.1:29500"
BUILT: list[tuple[Kind, str, tuple[int, int], str | None, str]] = [
    ("sglang", "--port 1", (0, 1), None, ""),
    ("sglang", "--port 1 --nnodes 1", (0, 1), MEET, ""),
    ("sglang", "--port 1", (1, 2), MEET, f"--node-rank 1 --nnodes 2 --dist-init-addr {MEET}"),
    ("sglang", "--node-rank 1", (1, 2), MEET, f"--nnodes 2 --dist-init-addr {MEET}"),
    ("sglang", "--nnodes=2 --node-rank=1", (1, 2), MEET, f"--dist-init-addr {MEET}"),
    ("sglang", f"--dist-init-addr={MEET}", (0, 2), None, "--node-rank 0 --nnodes 2"),
    ("sglang", f"--nccl-init-addr {MEET}", (0, 2), MEET, "--node-rank 0 --nnodes 2"),
    ("sglang", "-n 5", (0, 2), MEET, f"--node-rank 0 --nnodes 2 --dist-init-addr {MEET}"),
    ("vllm", "--port 1", (0, 1), None, ""),
    ("vllm", "--port 1", (0, 2), MEET, "--node-rank 0 --nnodes 2 --master-addr 10.0.0.1 --master-port 29500"),
    ("vllm", "-n 2 -r=1", (1, 2), MEET, "--master-addr 10.0.0.1 --master-port 29500 --headless"),
    ("vllm", "-n2 --node_rank 1 --headless", (1, 2), MEET, "--master-addr 10.0.0.1 --master-port 29500"),
    ("vllm", "--master-addr h", (1, 2), None, "--node-rank 1 --nnodes 2 --headless"),
    ("vllm", "--master-addr h --master-port=7 -dph", (1, 2), "h:7", "--node-rank 1 --nnodes 2"),
    ("vllm", "", (0, 2), "[fe80::1]:7", "--node-rank 0 --nnodes 2 --master-addr fe80::1 --master-port 7"),
]
REFUSED: list[tuple[Kind, str, str | None, str]] = [
    ("sglang", "", None, "more than one node, .* put --dist-init-addr HOST:PORT into"),
    ("sglang", "", "10.0.0.1", "HOST:PORT, e.g. .* not '10.0.0.1'"),
    ("sglang", "", "h:99999", "not 'h:99999'"),
    ("vllm", "--master-port 1", None, "put --master-addr HOST --master-port PORT into"),
]


@pytest.mark.parametrize(("kind", "words", "place", "dist_init", "added"), BUILT)
def test_a_command_gets_the_missing_options_of_its_place(
    kind: Kind, words: str, place: tuple[int, int], dist_init: str | None, added: str
) -> None:
    command = ("serve", *words.split())
    identity = Identity(replica=3, node_rank=place[0], nnodes=place[1])
    assert server_command(kind, command, identity, dist_init) == (*command, *added.split())


@pytest.mark.parametrize(("kind", "words", "dist_init", "says"), REFUSED)
def test_a_replica_whose_nodes_have_no_address_to_meet_at_is_refused(
    kind: Kind, words: str, dist_init: str | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        server_command(kind, ("serve", *words.split()), Identity(replica=3, node_rank=0, nnodes=2), dist_init)


def options(plan: ProfilePlan, *words: str, kind: Kind = "vllm", replica: int = 1) -> tuple[str, ...]:
    """The options added for profiling."""
    place = Identity(replica=replica, node_rank=0, gpus_per_node=2)
    return profiled_command(kind, ("serve", *words), place, plan, Path("/traces"))[1 + len(words) :]


def test_vllm_is_launched_with_what_the_plan_records() -> None:
    flag, chosen = options(ProfilePlan(with_stack=True, activities=frozenset({"cpu", "memory"})))
    assert flag == "--profiler-config"
    assert json.loads(chosen) == {
        "profiler": "torch",
        "torch_profiler_dir": "/traces/.vllm-1.0",
        "torch_profiler_with_stack": True,
        "torch_profiler_record_shapes": False,
        "torch_profiler_with_memory": True,
        "ignore_frontend": True,
    }


@pytest.mark.parametrize(
    ("plan", "words", "kind"),
    [
        (ProfilePlan(enabled=False), (), "vllm"),
        (ProfilePlan(ranks=frozenset({0})), (), "vllm"),  # of replica 0
        (ProfilePlan(tool="nsys"), (), "vllm"),
        (ProfilePlan(), ("--profiler-config", "{}"), "vllm"),
        (ProfilePlan(), ("--profiler_config.profiler=torch",), "vllm"),
        (ProfilePlan(), (), "sglang"),
    ],
)
def test_no_profiler_is_added_unless_the_replica_records_and_the_command_has_none(
    plan: ProfilePlan, words: tuple[str, ...], kind: Kind
) -> None:
    assert options(plan, *words, kind=kind) == ()


# --- a running server whose weights are copied ------------------------------------------------------------------------

COPIES = "--load-format remote_instance"
SEED = "--remote-instance-weight-loader-"
PORTS = f"{SEED}send-weights-group-ports"
ONE = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1}


@pytest.mark.parametrize(
    ("kind", "words", "nnodes", "lacks"),
    [
        ("sglang", COPIES, 1, True),
        ("sglang", "--load-format=remote_instance", 1, True),
        ("sglang", f"{COPIES} {SEED}backend transfer_engine", 1, True),
        ("sglang", "--load-format auto", 1, False),
        ("sglang", "remote_instance", 1, False),
        ("sglang", f"{COPIES} {SEED}backend=modelexpress", 1, False),
        ("sglang", f"{COPIES} {SEED}seed-instance-ip 10.0.0.1", 1, False),
        ("sglang", COPIES, 2, False),  # all of its ranks would meet at node rank 0 of the other
        ("vllm", COPIES, 1, False),
    ],
)
def test_a_command_lacks_a_peer_that_asks_for_a_copy_and_names_none(
    kind: Kind, words: str, nnodes: int, lacks: bool
) -> None:
    assert lacks_peer(kind, ("serve", *words.split()), Identity(replica=3, node_rank=0, nnodes=nnodes)) is lacks


@pytest.mark.parametrize(
    ("words", "info", "ports"),
    [
        (COPIES, ONE, "[20024]"),
        (f"{COPIES} --tp 2", {**ONE, "tp_size": 2}, "[20024, 20025]"),
        (f"{COPIES} --tensor_parallel_size=2", {**ONE, "tp_size": 2}, "[20024, 20025]"),
        (f"{COPIES} {PORTS} [7]", ONE, None),
    ],
)
def test_a_command_gets_the_peer_and_ports_of_its_own_replica(
    words: str, info: dict[str, object], ports: str | None
) -> None:
    command = ("serve", *words.split())
    place = [f"{SEED}seed-instance-ip", "node-1", f"{SEED}seed-instance-service-port", "30000"]
    full = with_peer(command, Identity(replica=3, node_rank=0), "http://node-1:30000", info)
    assert full == (*command, *place, *([PORTS, ports] if ports else []))


@pytest.mark.parametrize(
    ("words", "url", "info"),
    [
        (COPIES, "http://h:1", {**ONE, "tp_size": 2}),
        (f"{COPIES} --tp-size 2", "http://h:1", ONE),
        (f"{COPIES} --tp $TP", "http://h:1", ONE),
        (f"{COPIES} --pp-size=2", "http://h:1", ONE),
        (f"{COPIES} --dp 2", "http://h:1", ONE),
        (COPIES, "http://h:1", {**ONE, "pp_size": 2}),
        (COPIES, "http://h:1", {**ONE, "dp_size": 2}),
        (COPIES, "http://h:1", {**ONE, "nnodes": 2}),
        (COPIES, "https://h:1", ONE),
        (COPIES, "http://h:1", {}),  # a vLLM
    ],
)
def test_nothing_is_copied_from_a_server_of_another_shape(words: str, url: str, info: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"over http, .* the same --tp and no --pp, --dp or --nnodes. {url} has tp_size .*, this one ",
    ):
        with_peer(("serve", *words.split()), Identity(replica=3, node_rank=0), url, info)
