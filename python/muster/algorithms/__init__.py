"""torch.distributed.algorithms' names: uneven inputs (`join`) and communication hooks (`ddp_comm_hooks`)."""

from .join import Join, Joinable, JoinHook  # noqa: F401
