"""Collectives on picklable objects. Pickles run code: they are read only from ranks of the job, which have proved its secret."""

import pickle

from . import _C


def _pickled(objects):
    return lambda: [pickle.dumps(each) for each in objects]


def _fill(target, pickles):
    if pickles is not None:
        target[:] = [pickle.loads(each) for each in pickles]


def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None):
    """The root's list goes to all; lists of the same length everywhere. `src` is 0 where neither it nor `group_src` is given."""
    _fill(object_list, _C.broadcast_objects(group, device, src, group_src, len(object_list), _pickled(object_list)))


def all_gather_object(object_list, obj, group=None):
    """object_list[r] becomes the object of rank r."""
    _fill(object_list, _C.all_gather_objects(group, len(object_list), _pickled([obj])))


def gather_object(obj, object_gather_list=None, dst=None, group=None, group_dst=None):
    """On dst (0 where none is given) entry r of the list becomes the object of rank r; elsewhere the list is None."""
    length = 0 if object_gather_list is None else len(object_gather_list)
    _fill(object_gather_list, _C.gather_objects(group, dst, group_dst, length, _pickled([obj])))


def scatter_object_list(scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, group_src=None):
    """Entry r of the list on src (0 where none is given) becomes entry 0 of rank r's output list."""
    given = scatter_object_input_list or []
    mine = _C.scatter_objects(group, src, group_src, len(scatter_object_output_list), len(given), _pickled(given))
    if mine is not None:
        scatter_object_output_list[0] = pickle.loads(mine)


def send_object_list(object_list, dst=None, group=None, device=None, group_dst=None):
    """To be received by recv_object_list with a list as long."""
    _C.send_objects(group, device, dst, group_dst, _pickled(object_list))


def recv_object_list(object_list, src=None, group=None, device=None, group_src=None):
    """Returns the sender's rank; -1 for a non-member."""
    source, pickles = _C.recv_objects(group, device, src, group_src, len(object_list))
    if source >= 0:
        _fill(object_list, pickles)
    return source
