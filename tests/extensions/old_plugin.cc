// SPDX-License-Identifier: BSD-3-Clause
// A plugin of a muster with another plugin interface.
extern "C" unsigned muster_backend_plugin_abi() { return 0; }
extern "C" void muster_register_backends(void*) {}
