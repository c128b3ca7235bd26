// SPDX-License-Identifier: BSD-3-Clause
/// Texts in a store without write protection (torch's store, a file, etcd). Each carries an HMAC
/// with the job's secret over job, round, world size and rank. A writer without the secret can keep
/// the ranks from meeting and can do nothing else.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/security/secret.h"
#include "muster/key_value_store.h"
#include "muster/status.h"

namespace muster::store {

class SignedTexts {
 public:
  /// `job`: a name unique to this run, or, before one exists, the launcher's name of the job.
  SignedTexts(Secret secret, std::string job, int world_size)
      : secret_(std::move(secret)), job_(std::move(job)), world_size_(world_size) {}

  /// The text that `rank` puts into the store in `round`.
  std::string sign(std::string_view round, int rank, std::string_view text) const;
  /// Verifies what all ranks have put there and returns the texts, in rank order. Code::refused,
  /// naming the rank, if an HMAC is wrong or if this rank's entry is not `mine`.
  Result<std::vector<std::string>> open(std::string_view round, int rank, std::string_view mine,
                                        const std::vector<std::string>& all) const;
  /// Signs, calls `store.all_gather` under `key`, and opens the results; `round` is `key`.
  Result<std::vector<std::string>> all_gather(Store& store, const std::string& key, int rank,
                                              std::string_view text, Duration timeout) const;

 private:
  Secret::Proof proof_of(std::string_view round, int rank, std::string_view text) const;

  Secret secret_;
  std::string job_;
  int world_size_;
};

}  // namespace muster::store
