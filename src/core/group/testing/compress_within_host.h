// SPDX-License-Identifier: BSD-3-Clause
/// Tests that include this compress within one host, where all their ranks are.
#pragma once

#include <stdlib.h>

namespace muster::testing {

/// Sets MUSTER_COMPRESS_WITHIN_HOST for a scope in which no rank runs yet or any more.
class CompressWithinHost {
 public:
  explicit CompressWithinHost(bool compress) { ::setenv(kName, compress ? "1" : "0", 1); }
  ~CompressWithinHost() { ::setenv(kName, "1", 1); }
  CompressWithinHost(const CompressWithinHost&) = delete;
  CompressWithinHost& operator=(const CompressWithinHost&) = delete;

 private:
  static constexpr const char* kName = "MUSTER_COMPRESS_WITHIN_HOST";
};

/// For the whole program.
inline const CompressWithinHost kCompressWithinHost(true);

}  // namespace muster::testing
