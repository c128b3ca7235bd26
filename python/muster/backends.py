# SPDX-License-Identifier: BSD-3-Clause
"""Backends that are written in Python."""


class ProcessGroupBackend:
    """Carries out the calls of one group on this member: derive from it, and register a function
    that makes one (`Backend.register_backend`).

    muster has checked and numbered each call, and picked the backend by the tensors' device. The
    backend keeps the order of calls, honours `request.timeout`, names the ranks at fault, and ends
    its waits on `abort`. Its methods may be called on any thread, with the GIL.
    """

    def supports(self, op, dtype, device):
        """Whether it has the operation (a name as `all_reduce`) on such tensors (torch.dtype, a
        kind of device as text). Text instead of True says why not, as the end of a sentence: the
        user gets a DistBackendError that names the backend and the operation.
        """
        return True

    def submit(self, request):
        """Carries out a Request: reads its inputs, writes its outputs. None where all is done on
        return; else an object with `wait()`, such as a torch.futures.Future, which is waited for at
        once unless `request.async_op` is set or it is a receive. That of a receive from any rank
        has `source_rank()` too: the sender's, as the default group counts.
        """
        raise NotImplementedError

    def close(self, timeout):
        """The orderly end, on every member; `timeout`: what is left for it (datetime.timedelta)."""

    def abort(self, reason):
        """Ends what is in flight: its `wait()` raises."""
