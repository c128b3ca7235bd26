# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.device_mesh's names."""

import torch

from . import _C
from ._C import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]


class _MeshEnv:
    """As torch's `_mesh_resources`, which libraries ask. Current is the innermost mesh that this
    thread is in (`with mesh:`).
    """

    def get_current_mesh(self) -> DeviceMesh:
        return _C._current_mesh()

    def get_root_mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        return device_mesh._get_root_mesh()

    def _get_all_submeshes(self, device_mesh: DeviceMesh, mesh_dim_name: str) -> list[DeviceMesh]:
        return device_mesh._get_all_submeshes(mesh_dim_name)

    @staticmethod
    def num_devices_per_host(device_type: str) -> int:
        return _get_device_handle(device_type).device_count()

    @staticmethod
    def num_hosts(device_type: str) -> int:
        return _C.get_world_size() // _MeshEnv.num_devices_per_host(device_type)


_mesh_resources = _MeshEnv()


def _get_device_handle(device_type: str = "cuda"):
    """torch.cuda for "cuda", and so on; None where torch has no such module."""
    return getattr(torch, device_type, None)
