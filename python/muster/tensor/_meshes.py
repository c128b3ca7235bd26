# SPDX-License-Identifier: BSD-3-Clause
"""Muster's meshes as torch's: the same ranks and names, over the same groups."""

import threading
from typing import Any

from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import _mesh_resources as _torchs_current

from muster import _C
from muster._torch_groups import muster_group, other_rank, torch_group, when_dropped

_lock = threading.Lock()
_roots: dict[Any, TorchMesh] = {}  # one for each root mesh, so that its parts have one root


def _drop_roots_over(name: str) -> None:
    """Without the lock, under which groups are looked up."""
    for key in list(_roots):
        if name in key[1]:
            _roots.pop(key, None)


when_dropped.append(_drop_roots_over)


def as_torch(mesh: Any) -> TorchMesh:
    """torch's DeviceMesh for muster's; parts of one mesh are parts of one mesh again. Talks to
    nobody. A mesh of torch's is returned as it is. Raises ValueError (DistArgumentError) for
    anything else, and where this process is not in the mesh.
    """
    if isinstance(mesh, TorchMesh):
        return mesh
    if not isinstance(mesh, _C.DeviceMesh):
        raise _C.DistArgumentError(
            f"as_torch takes a DeviceMesh, and a {type(mesh).__name__} was given"
        )
    root = mesh._get_root_mesh()
    for part in (root, mesh):
        for group in part.get_all_groups():
            torch_group(group)  # torch finds it by its name from now on
    with _lock:
        of = _root_of(root)
        if mesh == root:
            return of
        names = mesh.mesh_dim_names
        for name, part in root._flatten_mapping.items():
            if name not in of._flatten_mapping:
                of._flatten_mapping[name] = _made(part, of)
        if names and len(names) == 1 and names[0] in of._flatten_mapping:
            return of._flatten_mapping[names[0]]
        if names and of.mesh_dim_names and set(names) <= set(of.mesh_dim_names):
            return of[names if len(names) > 1 else names[0]]
        return _made(mesh, None)


def _root_of(root: _C.DeviceMesh) -> TorchMesh:
    names = tuple(torch_group(each).group_name for each in root.get_all_groups())
    key = (root, names, root.get_rank())
    if key not in _roots:
        _roots[key] = _made(root, None)
    return _roots[key]


def _made(mesh: _C.DeviceMesh, root: TorchMesh | None) -> TorchMesh:
    groups = [torch_group(each) for each in mesh.get_all_groups()]
    made = TorchMesh(
        mesh.device_type,
        mesh.mesh,
        mesh_dim_names=mesh.mesh_dim_names,
        preserve_rank_order=mesh._preserve_rank_order,
        _init_backend=False,
        _rank=mesh.get_rank(),
    )
    made._dim_group_names = [each.group_name for each in groups]
    if root is not None:
        made._root_mesh = root
    registry = (root or made)._pg_registry
    registry.update({each.group_name: each for each in groups})
    made._thread_id = other_rank()
    made._hash = None
    return made


def mesh_or_current(mesh: Any) -> TorchMesh | None:
    """For an argument that may be left out: muster's mesh, or torch's, that the thread is in."""
    if mesh is not None:
        return as_torch(mesh)
    if _torchs_current.mesh_stack or not _C.is_initialized():
        return None
    try:
        return as_torch(_C._current_mesh())
    except RuntimeError:
        return None


def default_mesh(device_type: str = "cpu") -> TorchMesh:
    """All ranks of the default group in one dimension."""
    return mesh_over(_C.default_group(), device_type)


def mesh_over(group: _C.ProcessGroup, device_type: str = "cpu") -> TorchMesh:
    """The ranks of a group in one dimension."""
    return as_torch(_C.DeviceMesh.from_group(group, device_type))


def from_torch(mesh: TorchMesh) -> _C.DeviceMesh:
    """Muster's mesh with the groups of one of torch's that `as_torch` gave. Raises ValueError
    (DistArgumentError) for another.
    """
    groups = [muster_group(mesh.get_group(dim)) for dim in range(mesh.ndim)]
    if None in groups:
        raise _C.DistArgumentError(
            f"{mesh} has groups of torch.distributed's own: make it by muster.init_device_mesh"
        )
    names = mesh.mesh_dim_names
    if names is None and len(groups) > 1:
        names = tuple(f"dim_{dim}" for dim in range(mesh.ndim))  # several groups need some
    return _C.DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        mesh.device_type,
        mesh.mesh if len(groups) > 1 else None,
        mesh_dim_names=names,
    )
