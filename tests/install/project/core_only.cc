// SPDX-License-Identifier: BSD-3-Clause
// Links the torch-free half alone: a store that two handles share.
#include <cstdio>

#include <muster/key_value_store.h>

#if __has_include(<ATen/ATen.h>)
#error "muster::core must not bring torch's headers"
#endif

int main() {
  const auto store = muster::store::make_hash_store();
  const auto prefixed = muster::store::make_prefix_store("installed", store);
  const auto sum = prefixed->add("users", 2);
  if (!sum.ok() || *sum != 2) {
    std::fprintf(stderr, "add on a prefix store over a hash store did not give 2\n");
    return 1;
  }
  std::puts("core_only: ok");
}
