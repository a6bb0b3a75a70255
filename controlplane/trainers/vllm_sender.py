"""Sends a trainer's weights to vLLM over NCCL: `send=` of a sync whose source is a `Broadcast`.

Over NCCL vLLM is in no torch.distributed group: its workers join a `StatelessProcessGroup`, and a trainer that waits in
a group of torch's waits for ever. So what sends here is vLLM's own trainer side, of 0.32 or 0.33: the trainer must have
it installed. By itself it would call the engines too; here their agents do.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from schemas.commands import Broadcast
from schemas.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE: Final = "vllm.distributed.weight_transfer"


class VLLMSender:
    """Broadcasts tensors to the replicas of a source, in the order in which their agents receive them.

    The group is made at the first send, and used for each sync of the same source. After an error it is of no use: make
    another source, with another port and name, and a sender for that.

    Args:
        source: Where the engines meet the trainer, which listens there.
        weights: Returns the tensors, named as in the engine's own checkpoint. On a GPU, for NCCL.
        gpus_per_replica: Of all nodes of a replica together.
        init_info: Makes the init info of the trainer side of another back-end; that of NCCL by default.
    """

    def __init__(
        self,
        source: Broadcast,
        weights: "Callable[[], Mapping[str, Tensor]]",
        *,
        gpus_per_replica: int = 1,
        init_info: Callable[..., Any] | None = None,
    ) -> None:
        self._source, self._weights, self._init_info = source, weights, init_info
        self._world = 1 + len(source.replicas) * gpus_per_replica
        self._engine: Any = None

    def __call__(self, replicas: tuple[int, ...]) -> None:
        """Send the weights to these replicas. Raises EngineError if the group would wait for others."""
        if set(replicas) != set(self._source.replicas):
            raise EngineError(
                f"nothing was sent: replicas {list(replicas)} have prepared, and group {self._source.group!r} would "
                f"wait for {list(self._source.replicas)}. Make a group of those that are there."
            )
        engine, self._engine = self._engine or self._join(), None
        engine.send_weights()
        self._engine = engine

    def _join(self) -> Any:
        make = self._init_info or import_module(f"{PACKAGE}.nccl_engine").NCCLTrainerInitInfo
        place = {"master_address": self._source.host, "master_port": self._source.port, "world_size": self._world}
        factory = import_module(f"{PACKAGE}.factory").WeightTransferTrainerFactory
        # Agents have each tensor sent alone: the sizes of packed buffers are none of what they tell the engine.
        return factory.trainer_init(
            make(**place, rank=0, packed=False), client=_Agents(), source=_Weights(self._weights)
        )


class _Agents:
    """A client that leaves the engines to their agents, whatever it is asked for."""

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Metadata(list[Any]):
    """0.32 calls `metadata()`; 0.33 reads the attribute."""

    def __call__(self) -> "_Metadata":
        return self


class _Weights:
    """What vLLM's trainer side reads: a `WeightSource`, as 0.32 and 0.33 have it."""

    def __init__(self, weights: "Callable[[], Mapping[str, Tensor]]") -> None:
        self._weights = weights

    @property
    def metadata(self) -> _Metadata:
        meta = import_module(f"{PACKAGE}.base").ParamMeta
        return _Metadata(meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self)

    def implements_iter_full(self) -> bool:
        return True

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        return iter(sorted(self._weights().items()))

    iter_full = __iter__
