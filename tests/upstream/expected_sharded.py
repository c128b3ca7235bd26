# SPDX-License-Identifier: BSD-3-Clause
"""torch's tests of fully_shard that pass on stock torch and not on muster, and why."""

_WHY = {
    "looks at the insides of torch's units: its state objects, parameter groups and their hooks": {
        "comm": ("TestFullyShardPrefetch.test_fully_shard_multi_module_unused_module",),
        "frozen": (
            "TestFullyShardFrozen.test_train_mixed_requires_grad_across_groups",
            "TestFullyShardFrozen.test_train_mixed_requires_grad_per_group",
        ),
        "init": (
            "TestFullyShardLazyInit.test_fully_shard_double_lazy_init",
            "TestFullyShardLazyInit.test_fully_shard_is_root",
            "TestFullyShardLazyInit.test_fully_shard_module_and_param_fqns",
            "TestFullyShardLazyInit.test_fully_shard_multi_module_root",
            "TestFullyShardManagedModulesAndStates.test_managed_modules_nested",
            "TestFullyShardManagedModulesAndStates"
            ".test_managed_modules_nested_fully_shard_and_replicate",
            "TestFullyShardManagedModulesAndStates.test_managed_states_nested_fully_shard",
        ),
        "state": ("TestFullyShardState.test_fully_shard_state",),
    },
    "counts torch's operators of communication; the engine's calls are none": {
        "comm": (
            "TestFullyShardCommunication.test_manual_reshard_with_reshard_after_forward_false",
        ),
    },
    "refused, as torch refuses it; wants torch's text or class of the error": {
        "init": (
            "TestFullyShardMeshArg.test_invalid_mesh_ndim",
            "TestFullyShardShardPlacementFn.test_invalid_shard_dim",
            "TestFullyShardShardedParameterTensor.test_raise_scalar_parameter",
        ),
        "state": (
            "TestFullyShardState.test_fully_shard_deepcopy",
            "TestFullyShardState.test_fully_shard_reapply",
            "TestFullyShardState.test_fully_shard_unsupported_module_cls",
        ),
    },
    "wants an error for what muster does: meshes without names, uneven rows of any dimension, "
    "strided parameters": {
        "init": (
            "TestFullyShardMeshArg.test_2d_mesh_without_mesh_dim_names",
            "TestFullyShardShardPlacementFn.test_init_1d_uneven_shard_largest_dim",
            "TestFullyShardShardedParameterTensor.test_raise_noncontiguous_parameter",
        ),
    },
    "parameters on the meta device get memory at once, which is not-a-number until it is set": {
        "init": (
            "TestFullyShardMetaDeviceInit.test_invalid_meta_device_init",
            "TestFullyShardMetaDeviceInit.test_meta_device_1d_init",
            "TestFullyShardMetaDeviceInit.test_meta_device_2d_init",
            "TestFullyShardMetaDeviceInit.test_rank0_broadcast_meta_device_init",
        ),
    },
    "tensor subclasses with all_gather of their own are refused": {
        "extensions": (
            "TestFullyShardAllGatherExtensionsMultiProcess.test_all_gather_extensions_train_parity",
            "TestFullyShardAllGatherExtensionsMultiThread.test_all_gather_extension_hsdp_mesh",
            "TestFullyShardAllGatherExtensionsMultiThread"
            ".test_all_gather_extension_outer_size_stride",
            "TestFullyShardAllGatherExtensionsMultiThread.test_all_gather_extensions_end_to_end",
            "TestFullyShardAllGatherExtensionsMultiThread.test_all_gather_extensions_monkey_patch",
        ),
    },
    "a module is converted before it is sharded; afterwards that is refused by name": {
        "training": ("TestFullyShardCastAfterInit.test_to_float64_after_init",),
    },
}
SHARDED = {
    f"_composable/fsdp/test_fully_shard_{part}.py::{test}": why
    for why, parts in _WHY.items()
    for part, tests in parts.items()
    for test in tests
}
