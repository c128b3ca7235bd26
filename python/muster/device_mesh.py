"""torch.distributed.device_mesh's names."""

from ._C import DeviceMesh, init_device_mesh  # noqa: F401
