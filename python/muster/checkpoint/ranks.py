# SPDX-License-Identifier: BSD-3-Clause
"""Random states, which each rank has for itself, and the ranks that save as one job."""

import datetime
import random
import threading
import weakref

import torch
from torch.distributed.constants import default_pg_timeout

from muster import _C

_NO_TIMEOUT = datetime.timedelta(days=365)


class RandomState:
    """The random states of torch (the CPU's generator and those of the CUDA devices in use), Python
    and, where it is imported, numpy, of every rank. Put one into the state: `{"random":
    RandomState()}`. Loading sets this rank's; a rank of a higher number than were saved keeps its
    own.
    """

    def tensors(self, key, rank):
        """By name, as they are now."""
        import sys

        version, words, gauss = random.getstate()
        found = {
            f"{key}.torch.{rank}": torch.get_rng_state(),
            f"{key}.python.{rank}": torch.tensor([version, *words], dtype=torch.int64),
            f"{key}.python_gauss.{rank}": torch.tensor(
                [] if gauss is None else [gauss], dtype=torch.float64
            ),
        }
        if "numpy" in sys.modules:
            import numpy

            kind, words, place, has_gauss, gauss = numpy.random.get_state()
            if kind == "MT19937":
                numbers = [int(each) for each in words]
                found[f"{key}.numpy.{rank}"] = torch.tensor(
                    [place, has_gauss, *numbers], dtype=torch.int64
                )
                found[f"{key}.numpy_gauss.{rank}"] = torch.tensor([gauss], dtype=torch.float64)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found[f"{key}.cuda.{rank}"] = torch.cuda.get_rng_state()
        return found

    def set(self, key, rank, found):
        """From tensors by name; what is not there stays."""

        def of(kind):
            return found.get(f"{key}.{kind}.{rank}")

        if of("torch") is not None:
            torch.set_rng_state(of("torch"))
        if of("python") is not None:
            version, *words = of("python").tolist()
            gauss = of("python_gauss")
            random.setstate(
                (version, tuple(words), gauss.item() if gauss is not None and len(gauss) else None)
            )
        if of("numpy") is not None:
            import numpy

            place, has_gauss, *words = of("numpy").tolist()
            numpy.random.set_state(("MT19937", words, place, has_gauss, of("numpy_gauss").item()))
        if of("cuda") is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(of("cuda"))


class Members:
    """The ranks of one save or load: a group of muster's, stock torch's, or this process alone."""

    def __init__(self, process_group=None, no_dist=False, *, loads=False):
        self.rank, self.size, self.native = 0, 1, None
        self.key = None  # the group where it is stock torch's
        if no_dist:
            return
        if process_group is None and _C.is_initialized():
            import muster

            process_group = muster.group.WORLD
        if isinstance(process_group, _C.ProcessGroup):
            self.rank, self.size = process_group.rank(), process_group.size()
            self.native = process_group
            return
        stock = torch.distributed
        if process_group is None and not (stock.is_available() and stock.is_initialized()):
            return
        self.rank, self.size = stock.get_rank(process_group), stock.get_world_size(process_group)
        self.key = process_group or stock.group.WORLD
        self.native = (self.rank, self.size, *_exchanges(self.key, loads))


_stock_groups = weakref.WeakKeyDictionary()  # by group of stock torch's
_stock_groups_lock = threading.Lock()


def _exchanges(process_group, loads):
    """Two functions that exchange texts among the ranks of a group of stock torch's: for the
    caller's thread, and for the thread of a saver.

    Calls of one group must come in one order on all ranks. So what may go on at once has groups of
    its own: the program's calls, the beginnings of saves, what savers do behind them, and loads.
    """
    stock = torch.distributed
    with _stock_groups_lock:
        if process_group not in _stock_groups:
            ranks = stock.get_process_group_ranks(process_group)
            backend = stock.get_backend(process_group)
            _stock_groups[process_group] = [
                stock.new_group(
                    ranks,
                    backend="gloo" if backend == "nccl" else backend,
                    use_local_synchronization=True,
                )
                for _ in ("saves", "savers", "loads")
            ]
        saves, savers, loading = map(_StockExchange, _stock_groups[process_group])
    return (loading, loading) if loads else (saves, savers)


class _StockExchange:
    def __init__(self, group):
        self._group = group

    def __call__(self, mine, has_timeout):
        self._group.set_timeout(default_pg_timeout if has_timeout else _NO_TIMEOUT)
        gathered = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(gathered, mine, group=self._group)
        return gathered
