"""What `VLLMSender` hands to vLLM's trainer side, which stands in here; the real one is in test_vllm_broadcast.py."""

import sys
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from controlplane.trainers.vllm_sender import PACKAGE, VLLMSender
from schemas.commands import Broadcast
from schemas.errors import EngineError

SOURCE = Broadcast(host="10.0.0.1", port=29600, group="weights-7", replicas=(0, 2))


class TrainerSide:
    """vLLM's. Notes how it was made, and what it would send."""

    def __init__(self, init_info: Any, client: Any, source: Any) -> None:
        self.init_info, self.client, self.source = init_info, client, source
        self.sent: list[list[str]] = []
        self.breaks = False

    def send_weights(self) -> None:
        if self.breaks:
            raise ConnectionError("a peer is gone")
        self.client.start_weight_update()
        self.client.update_weights({})
        self.client.finish_weight_update()
        for meta, pairs in (
            (self.source.metadata(), self.source),  # as 0.32 reads a source
            (self.source.metadata, self.source.iter_full()),  # and 0.33
        ):
            assert [each.name for each in meta] == [name for name, _ in pairs]
        assert self.source.implements_iter_full()
        self.sent.append([f"{each.name} {each.dtype} {each.shape}" for each in self.source.metadata])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TrainerSide]:
    sides: list[TrainerSide] = []

    def trainer_init(init_info: Any, *, client: Any, source: Any) -> TrainerSide:
        sides.append(TrainerSide(init_info, client, source))
        return sides[-1]

    factory = SimpleNamespace(WeightTransferTrainerFactory=SimpleNamespace(trainer_init=trainer_init))
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.factory", factory)
    base = SimpleNamespace(ParamMeta=namedtuple("ParamMeta", "name dtype shape"))
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.base", base)
    nccl = SimpleNamespace(NCCLTrainerInitInfo=SimpleNamespace)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.nccl_engine", nccl)
    for name in ("vllm", "vllm.distributed", PACKAGE):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    return sides


def test_tensors_go_in_the_order_in_which_agents_receive_them_and_the_group_is_used_again(
    made: list[TrainerSide],
) -> None:
    weights = {"b": torch.zeros(2, 3), "a": torch.zeros(1, dtype=torch.bfloat16)}
    sender = VLLMSender(SOURCE, lambda: weights, gpus_per_replica=4)
    sender((0, 2))
    sender((0, 2))
    (side,) = made
    assert side.sent == [["a torch.bfloat16 (1,)", "b torch.float32 (2, 3)"]] * 2
    place = {"master_address": "10.0.0.1", "master_port": 29600, "world_size": 9, "rank": 0, "packed": False}
    assert vars(side.init_info) == place


def test_nothing_is_sent_into_a_group_that_lacks_a_member(made: list[TrainerSide]) -> None:
    with pytest.raises(
        EngineError, match=r"replicas \[0\] have prepared, and group 'weights-7' would wait for \[0, 2\]"
    ):
        VLLMSender(SOURCE, dict)((0,))
    assert made == []


def test_a_group_that_broke_is_not_used_again(made: list[TrainerSide]) -> None:
    sender = VLLMSender(SOURCE, dict)
    sender((0, 2))
    made[0].breaks = True
    with pytest.raises(ConnectionError):
        sender((0, 2))
    sender((0, 2))
    assert len(made) == 2
