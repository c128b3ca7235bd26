# SPDX-License-Identifier: BSD-3-Clause
"""Options of ProcessGroup's methods, as torch's structs of those names; and the facts of a call
that hooks get.
"""

import datetime
import enum
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _C

_BACKENDS_OWN = datetime.timedelta(milliseconds=-1)  # torch's mark for the group's own timeout


@dataclass
class _Options:
    timeout: datetime.timedelta = _BACKENDS_OWN  #: negative: the group's
    asyncOp: bool = True  #: taken for torch's sake: methods give a Work in any case


@dataclass
class _Reducing(_Options):
    reduceOp: _C.ReduceOp = field(default_factory=lambda: _C.ReduceOp.SUM)


@dataclass
class _Rooted(_Options):
    rootRank: int = -1  #: of the group


class AllgatherOptions(_Options):
    """Options of the gathers to all: `timeout`."""


class AllToAllOptions(_Options):
    """Options of `alltoall`: `timeout`."""


class AllreduceOptions(_Reducing):
    """Options of `allreduce`: `reduceOp`, `timeout`."""


class AllreduceCoalescedOptions(_Reducing):
    """Options of `allreduce_coalesced`: `reduceOp`, `timeout`."""


class ReduceScatterOptions(_Reducing):
    """Options of the reduce-scatters: `reduceOp`, `timeout`."""


class GatherOptions(_Rooted):
    """Options of `gather`: `rootRank` of the group, `timeout`."""


class ScatterOptions(_Rooted):
    """Options of `scatter`: `rootRank` of the group, `timeout`."""


@dataclass
class BroadcastOptions(_Rooted):
    """Options of `broadcast`: `rootRank` of the group, `timeout`. `rootTensor` is the one of
    several on the root, 0 alone here.
    """

    rootTensor: int = 0


@dataclass
class ReduceOptions(_Reducing):
    """Options of `reduce`: `reduceOp`, `rootRank` of the group, `timeout`. `rootTensor` as in
    BroadcastOptions.
    """

    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class BarrierOptions(_Options):
    """Options of `barrier`: `timeout`. Devices are taken for torch's sake."""

    device_ids: list[int] = field(default_factory=list)
    device: torch.device | None = None


class HookOpName(enum.Enum):
    """The kind of a call that a hook is told of, torch's names."""

    SEND = "send"
    RECV = "recv"
    BROADCAST = "broadcast"
    ALLREDUCE = "all_reduce"
    REDUCE = "reduce"
    ALLGATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALLTOALL = "all_to_all"
    BARRIER = "barrier"
    SCATTER = "scatter"
    GATHER = "gather"
    ALLREDUCE_COALESCED = "all_reduce_coalesced"
    ALLGATHER_BASE = "all_gather_into_tensor"
    ALLGATHER_COALESCED = "all_gather_coalesced"
    REDUCE_SCATTER_BASE = "reduce_scatter_tensor"
    REDUCE_SCATTER_TENSOR_COALESCED = "reduce_scatter_coalesced"
    ALLTOALL_BASE = "all_to_all_single"
    UNKNOWN = "unknown"


@dataclass
class PreHookArgs:
    """A call that is about to start: its tensors, the root's rank in the group (-1: none), and a
    number that PostHookArgs has too.
    """

    name: HookOpName
    op_id: int
    async_op: bool
    input_tensors: list[torch.Tensor]
    output_tensors: list[torch.Tensor]
    root: int


@dataclass
class PostHookArgs:
    """A call that has started; `work` is None where it was synchronous, which has ended then."""

    name: HookOpName
    op_id: int
    async_op: bool
    work: Any


class BackendConfig:
    """Which backend serves which kind of device: of a name, or of text as `cpu:native,cuda:nccl`.
    `device_backend_map` is the dict.
    """

    def __init__(self, backend: str) -> None:
        text = str(backend)
        self.device_backend_map: dict[str, str] = {}
        if ":" in text:
            for each in text.lower().split(","):
                kind, separator, name = each.partition(":")
                if not separator or kind in self.device_backend_map:
                    raise ValueError(
                        f"BackendConfig: {text!r} names no backend, or two, for {kind!r}; write it "
                        "as cpu:native,cuda:nccl"
                    )
                self.device_backend_map[kind] = _C.parse_backend(name)
        elif text and text != "undefined":
            self.device_backend_map = dict.fromkeys(("cpu", "cuda"), _C.parse_backend(text))

    def get_device_backend_map(self) -> dict[str, str]:
        """From kinds of devices to names."""
        return self.device_backend_map

    def __repr__(self) -> str:
        return ",".join(f"{kind}:{name}" for kind, name in self.device_backend_map.items())


class BuiltinCommHookType(enum.IntEnum):
    """The hooks that DistributedDataParallel._register_builtin_comm_hook takes."""

    ALLREDUCE = 0
    FP16_COMPRESS = 1
