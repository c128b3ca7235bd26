# SPDX-License-Identifier: BSD-3-Clause
"""torch's own tests of fully_shard, which ask for GPUs, on CPUs: on stock torch with Gloo, or with
muster's fully_shard in the place of torch's. checkout.py runs them.

A file's text names GPUs in many places; `on_cpu` changes those. Ranks are forks, also where torch
has threads. With muster, torch's default group and meshes are muster's too, and there is no Gloo.
"""

import contextlib
import os
import re
import sys

import torch
import torch.distributed as dist
from forked_ranks import ForkedRanks
from torch.testing._internal import common_distributed, common_fsdp, common_utils
from torch.testing._internal.common_distributed import MultiProcessTestCase

WORLD = 4  # what torch.cuda.device_count() is to the tests
NAMES = (
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
)
# Patterns in a file -> their replacement for ranks without GPUs and the installed torch.
CHANGES = (
    (r"\n *@(requires_cuda|skipIfRocm|skip_if_lt_x_gpu\(\d\))(?=\n)", ""),
    (r"import HAS_CUDA\n", "import HAS_GPU as HAS_CUDA\n"),
    (r"not (TEST_CUDA|HAS_GPU|HAS_CUDA)\b", "False"),
    (r'torch\.device\(\s*"cuda"[^)]*current_device\(\)\)', 'torch.device("cpu")'),
    (r'torch\.device\("cuda", 0\)', 'torch.device("cpu")'),
    (r"torch\.cuda\.device_count\(\)", str(WORLD)),
    (r'"cuda(:0)?"', '"cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
    (r"device_ids=\[self\.rank\],?", ""),
    (r"torch\.cuda\._sleep\(.*\)", "None"),
    (r"torch\.cuda\.", "torch.cpu."),
    (r"\btest_compiled_fsdp\b", "compiled_fsdp_test"),
)


def on_cpu(text):
    for pattern, replacement in CHANGES:
        text = re.sub(pattern, replacement, text)
    return text


class _Ranks(MultiProcessTestCase):
    """common_fsdp's FSDPTest and FSDPTestMultiThread."""

    on_muster = False
    destroy_pg_upon_exit = False  # by `run_test`: `_run` does

    @property
    def world_size(self):
        return WORLD

    @property
    def process_group(self):
        return dist.distributed_c10d._get_default_group()

    def run_subtests(self, *arguments, **options):
        return common_distributed.run_subtests(self, *arguments, **options)

    def perThreadSetUp(self):
        pass

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **_):
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        place = dict(rank=rank, world_size=int(self.world_size))
        with contextlib.ExitStack() as around:
            if cls.on_muster:
                import muster
                from muster import _torch_groups

                muster.init_process_group(init_method=f"file://{file_name}-muster", **place)
                around.callback(muster.destroy_process_group)
                around.enter_context(_torch_groups.as_default_group())
            else:
                dist.init_process_group("gloo", init_method=f"file://{file_name}", **place)
                around.callback(dist.destroy_process_group)
            common_utils.set_rng_seed()
            self.perThreadSetUp()
            self.run_test(test_name, pipe)


class Ranks(ForkedRanks, _Ranks):
    pass


def _put_muster_in_place():
    import torch.distributed._composable.fsdp as old_names

    import muster
    import muster.fsdp
    import muster.tensor

    def init_device_mesh(*arguments, **options):
        return muster.tensor.as_torch(muster.init_device_mesh(*arguments, **options))

    def new_group(ranks=None, **_):
        from muster import _torch_groups

        group = muster.new_group(ranks)
        return _torch_groups.torch_group(group) if group else None

    old_module = sys.modules["torch.distributed._composable.fsdp.fully_shard"]
    for name in NAMES:
        for module in (torch.distributed.fsdp, old_names, old_module, common_fsdp):
            if hasattr(module, name):
                setattr(module, name, getattr(muster.fsdp, name))
    for module in (dist, dist.device_mesh, dist.tensor, dist._tensor):
        module.init_device_mesh = init_device_mesh
    for module in (dist, dist.distributed_c10d):
        module.new_group = new_group


def prepare(on_muster):
    """Before a file is loaded."""
    import torch.distributed._tensor  # noqa: F401

    Ranks.on_muster = on_muster
    if on_muster:
        _put_muster_in_place()
    common_fsdp.FSDPTest = common_fsdp.FSDPTestMultiThread = Ranks
    common_utils.get_cycles_per_ms = lambda: 1.0
    Ranks.log = os.environ.get("MUSTER_TEST_LOG", os.devnull)
