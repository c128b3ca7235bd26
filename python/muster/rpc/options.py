# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.rpc.options' name."""

from .._C import RpcBackendOptions as TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]
