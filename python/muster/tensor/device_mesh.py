# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.tensor.device_mesh's names: muster's meshes."""

from muster.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
