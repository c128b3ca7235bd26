# SPDX-License-Identifier: BSD-3-Clause
"""muster's DeviceMesh beside torch's: the same program on both, torch's over Gloo."""

import copy
import pickle

import pytest
import torch
from ranks import meeting_file, run_ranks


def both_faces(rank, size, file):
    """(name, its names, its meshes' module) of torch and muster, each with a default group."""
    import torch.distributed as theirs
    import torch.distributed.device_mesh as their_meshes

    import muster as ours
    import muster.device_mesh as our_meshes

    for name, dist, meshes in (("torch", theirs, their_meshes), ("muster", ours, our_meshes)):
        dist.init_process_group(
            "gloo", init_method=f"file://{file}-{name}", rank=rank, world_size=size
        )
        yield name, dist, meshes
        dist.destroy_process_group()


def raised(call):
    """The classes of a wrong call's exception, among those that programs look for."""
    try:
        call()
    except Exception as error:
        return {
            each
            for each in (KeyError, IndexError, ValueError, RuntimeError)
            if isinstance(error, each)
        } or {type(error)}
    return set()


def told(dist, mesh, rank):
    """All that a mesh says of itself, in plain values."""
    inside = mesh.get_coordinate() is not None
    return {
        "type": mesh.device_type,
        "mesh": mesh.mesh.tolist(),
        "dtype": mesh.mesh.dtype,
        "shape": mesh.shape,
        "ndim": mesh.ndim,
        "size": mesh.size(),
        "sizes": [mesh.size(dim) for dim in range(-mesh.ndim, mesh.ndim)],
        "names": mesh.mesh_dim_names,
        "coordinate": mesh.get_coordinate(),
        "symbolic": [mesh._sym_get_coordinate(d) for d in range(mesh.ndim)] if inside else None,
        "part": mesh._is_current_rank_part_of_mesh(),
        "rank": mesh.get_rank(),
        "repr": repr(mesh),
        "groups": [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
        if inside
        else None,
        "group": [
            dist.get_process_group_ranks(mesh.get_group(d)) for d in range(-mesh.ndim, mesh.ndim)
        ]
        if inside
        else None,
        "local": [mesh.get_local_rank(d) for d in range(mesh.ndim)] if inside else None,
        "root": (
            mesh._get_root_mesh().mesh_dim_names,
            mesh._get_root_mesh() == mesh,
            mesh._root_mesh is None,
        ),
        "flattened": sorted(mesh._flatten_mapping),
        "private": (
            mesh._device_type,
            mesh._mesh_dim_names,
            mesh._rank,
            mesh._coordinate_on_dim,
            mesh._flatten_rank_map,
            mesh._rank_map.tolist(),
            mesh._preserve_rank_order,
        ),
        "current": mesh_in_scope(mesh),
        "equal": (mesh == mesh, mesh != mesh, mesh == 1, hash(mesh) == hash(mesh)),
    }


def mesh_in_scope(mesh):
    import sys

    resources = sys.modules[
        type(mesh).__module__ if "torch" in type(mesh).__module__ else "muster.device_mesh"
    ]._mesh_resources
    with mesh as entered:
        return entered is mesh, resources.get_current_mesh() == mesh


def a_program(dist, meshes, rank):
    """The answers of all meshes of the program, by name; the program is torch's."""
    said = {}

    def look(name, mesh):
        said[name] = told(dist, mesh, rank)
        return mesh

    mesh = look(
        "cube", meshes.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("rep", "shard", "tp"))
    )
    said["itself"] = mesh["rep", "shard", "tp"] is mesh
    look("tp", mesh["tp"])
    look("one of one", mesh[("rep",)])
    look("ends", mesh["rep", "tp"])
    dp = look("dp", mesh["rep", "shard"]._flatten("dp"))
    said["again"] = mesh["rep", "shard"]._flatten("dp") == dp
    said["by name"] = (
        mesh["dp"] == dp,
        mesh.get_local_rank("dp"),
        dist.get_process_group_ranks(mesh.get_group("dp")),
        dist.get_process_group_ranks(mesh["tp"].get_group("dp")),
    )
    both = look("dp, tp", mesh["dp", "tp"])
    look("dp of dp, tp", both["dp"])
    said["names"] = (
        [both._get_mesh_dim_by_name(name) for name in ("dp", "tp")],
        mesh["tp"]._get_root_mesh_dim(),
    )
    look("all", both._flatten())
    strided = look("strided", mesh["rep", "tp"]._flatten())
    look("cut", strided._unflatten("rep_tp", (2, 2), ("a", "b")))
    look("cube with flattened", mesh)
    said["itself flat"] = mesh["tp"]._flatten() == mesh["tp"]

    line = look("line", meshes.init_device_mesh("cpu", (8,), mesh_dim_names=("world",)))
    grid = look("grid", line._unflatten(0, (2, 4), ("pp", "dp")))
    look("pp", grid["pp"])
    look("deeper", grid._unflatten("dp", (2, 2), ("rep", "shard")))
    look("together", meshes.DeviceMesh._concatenate([grid["pp"], grid["dp"]]))
    said["submeshes"] = [each.mesh.tolist() for each in grid._get_all_submeshes("dp")]

    look("unnamed", meshes.init_device_mesh("cpu", (4, 2)))
    look("thin", meshes.init_device_mesh("cpu", (1, 8), mesh_dim_names=("one", "rest")))
    look("some", meshes.DeviceMesh("cpu", [1, 6, 2]))
    look("mixed", meshes.DeviceMesh("cpu", [[7, 1, 2, 4], [3, 5, 0, 6]], mesh_dim_names=("x", "y")))
    look(
        "in order",
        meshes.DeviceMesh(
            "cpu", torch.tensor([[7, 1, 2, 4], [3, 5, 0, 6]]), preserve_rank_order=True
        ),
    )
    look("reversed", meshes.DeviceMesh("cpu", torch.arange(7, -1, -1)))
    bare = meshes.DeviceMesh("cpu", torch.arange(8), _init_backend=False)
    said["bare"] = (
        raised(bare.get_group) >= {RuntimeError},
        bare.get_coordinate(),
        bare.mesh.tolist(),
        bare.size(),
    )
    elsewhere = meshes.DeviceMesh("cpu", torch.arange(8).view(4, 2), _init_backend=False, _rank=5)
    said["elsewhere"] = elsewhere.get_coordinate(), elsewhere._rank
    override = meshes.DeviceMesh(
        "cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], backend_override=(("gloo", None), (None, None))
    )
    look("override", override)

    look(
        "of a group",
        meshes.DeviceMesh.from_group(mesh.get_group("tp"), "cpu", mesh_dim_names=("tp",)),
    )
    look(
        "of groups",
        meshes.DeviceMesh.from_group(
            both.get_all_groups(), "cpu", both.mesh, mesh_dim_names=("dp", "tp")
        ),
    )

    pairs = {
        "same": (
            mesh,
            meshes.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("rep", "shard", "tp")),
        ),
        "other names": (line, meshes.init_device_mesh("cpu", (8,), mesh_dim_names=("w",))),
        "other shape": (line, grid),
        "part": (mesh["tp"], mesh["tp"]),
        "parts": (mesh["tp"], mesh["rep"]),
    }
    said["equality"] = {
        name: (a == b, hash(a) == hash(b) if a == b else None) for name, (a, b) in pairs.items()
    }
    for name, each in (
        ("cube", mesh),
        ("dp, tp", both),
        ("tp", mesh["tp"]),
        ("dp", dp),
        ("some", meshes.DeviceMesh("cpu", [1, 6, 2])),
    ):
        for how, again in (
            ("pickled", pickle.loads(pickle.dumps(each))),
            ("copied", copy.deepcopy(each)),
        ):
            said[how, name] = told(dist, again, rank), again == each, hash(again) == hash(each)

    # Wrong arguments raise an error of at least the class that torch raises.
    said["wrong"] = {
        "no such name": lambda: mesh["nothing"],
        "no such name of a slice": lambda: mesh["tp"]["dp"],
        "no such group": lambda: mesh.get_group("nothing"),
        "no such number": lambda: mesh.get_group(3),
        "no such size": lambda: mesh.size(3),
        "which": lambda: mesh.get_group(),
        "which rank": lambda: mesh.get_local_rank(),
        "overlapping": lambda: mesh["rep", "dp"],
        "taken": lambda: mesh["rep", "shard"]._flatten("tp"),
        "taken by another": lambda: mesh["rep", "tp"]._flatten("dp"),
        "product": lambda: line._unflatten(0, (3, 2), ("a", "b")),
        "range": lambda: line._unflatten(1, (4, 2), ("a", "b")),
        "names of sizes": lambda: line._unflatten(0, (4, 2), ("a",)),
        "concatenated twice": lambda: meshes.DeviceMesh._concatenate([mesh["tp"], mesh["tp"]]),
        "not of one": lambda: meshes.DeviceMesh._concatenate(
            [mesh["tp"], meshes.DeviceMesh("cpu", [1, 6, 2], mesh_dim_names=("z",))["z"]]
        ),
        "names twice": lambda: meshes.init_device_mesh("cpu", (4, 2), mesh_dim_names=("a", "a")),
        "indexed device": lambda: meshes.init_device_mesh("cpu:0", (8,)),
        "no dimension": lambda: mesh._get_mesh_dim_by_name("nothing"),
        "submesh": lambda: mesh["tp"].abort(),
        "no mesh": lambda: meshes._mesh_resources.get_current_mesh(),
        "other ranks": lambda: meshes.DeviceMesh.from_group(mesh.get_group("tp"), "cpu", [0, 7]),
    }
    said["wrong"] = {name: raised(call) for name, call in said["wrong"].items()}
    return said


def on_both(rank, file):
    heard = {
        name: a_program(dist, meshes, rank) for name, dist, meshes in both_faces(rank, 8, file)
    }
    theirs, ours = heard["torch"], heard["muster"]
    wrong = theirs.pop("wrong"), ours.pop("wrong")
    for name in theirs:
        assert ours[name] == theirs[name], (
            f"{name}:\n{ours[name]}\n  is not torch's\n{theirs[name]}"
        )
    assert {
        name: (theirs, wrong[1][name])
        for name, theirs in wrong[0].items()
        if not theirs <= wrong[1][name] or not theirs
    } == {}


# spec: D6 every method and property gives what torch's gives, on the same program: slices,
# flattened, unflattened and concatenated dimensions, groups, coordinates, equality, hashes, texts,
# pickles, copies, and the classes of errors
@pytest.mark.filterwarnings("ignore")
def test_device_mesh_beside_torch():
    run_ranks(8, on_both, meeting_file())


def all_names(rank, file):
    theirs, ours = (meshes.DeviceMesh for _, _, meshes in both_faces(rank, 1, file))
    # Names that only torch.compile and the class itself use.
    inside = {
        "_create_flatten_mesh",
        "_create_sub_mesh",
        "_create_unflatten_mesh",
        "_compute_coordinate_on_dim",
        "_compute_coordinates_from_mesh",
        "_get_mesh_tensor_from_full_mesh",
        "_get_slice_mesh_layout",
        "_hash_key",
        "_init_one_process_group",
        "_init_process_groups",
        "_setup_world_group_and_device",
        "_stable_hash",
    }
    own = {name for each in theirs.__mro__[:1] for name in vars(each) if not name.startswith("__")}
    assert own - inside - set(dir(ours)) == set()


# spec: D6 all names of torch's class are there
def test_all_names_of_the_class():
    run_ranks(1, all_names, meeting_file())


def aborts(rank, file):
    import muster as dist
    from muster.device_mesh import init_device_mesh

    dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.get_group("tp").group_desc == "mesh_tp"
    flat = mesh["dp", "tp"]._flatten("flat")
    if rank == 0:
        mesh.abort()
    for group in [*mesh.get_all_groups(), flat.get_group()] if rank == 0 else [flat.get_group()]:
        with pytest.raises(dist.DistBackendError, match="DeviceMesh.abort"):
            while True:
                dist.all_reduce(torch.ones(1), group=group)


# spec: D6 abort ends the groups of all dimensions and flattened parts
def test_abort():
    run_ranks(4, aborts, meeting_file())
