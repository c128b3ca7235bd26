# SPDX-License-Identifier: BSD-3-Clause
"""An accelerator for Python where there is none: 8 devices in host memory, or MUSTER_TEST_DEVICES,
of type "deferred".

`import torch` loads it by itself, as it loads what vendors ship (the entry point `torch.backends`),
in a program whose PYTHONPATH has build/<preset>/tests/accelerator. `torch.accelerator` then counts
them, and `.to(1)` moves there, as it moves to cuda:1 elsewhere.
"""

import contextlib
import os
import types

import _muster_test_device as native
import torch


def _index(device) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0


@contextlib.contextmanager
def _on(device):
    before = native.current_device()
    native.set_device(_index(device))
    try:
        yield
    finally:
        native.set_device(before)


def install() -> None:
    """Makes it torch's accelerator, before anything is computed: autograd counts the devices at its
    first backward pass.
    """
    native.install(int(os.environ.get("MUSTER_TEST_DEVICES", "8")))
    torch.utils.rename_privateuse1_backend("deferred")
    module = types.ModuleType("torch.deferred")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = native.device_count
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(_index(device))
    module.device = _on
    module._is_in_bad_fork = lambda: False  # its memory is a fork's own
    module.manual_seed = module.manual_seed_all = lambda seed: None  # it draws on the CPU
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch._register_device_module("deferred", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
