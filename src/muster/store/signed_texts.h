/// Texts that lie in a store which anybody may write to (torch's store, a file, etcd), each with a
/// proof of the job's secret over job, round, world size and rank: who writes there without the
/// secret can keep the ranks from meeting, and nothing else.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "muster/base/secret.h"
#include "muster/key_value_store.h"
#include "muster/status.h"

namespace muster::store {

class SignedTexts {
 public:
  /// `job`: a name that no other run has, or before there is one what the launcher calls the job.
  SignedTexts(Secret secret, std::string job, int world_size)
      : secret_(std::move(secret)), job_(std::move(job)), world_size_(world_size) {}

  /// What `rank` puts into the store in `round`.
  std::string sign(std::string_view round, int rank, std::string_view text) const;
  /// The texts of what all ranks have put there, in rank order. Code::refused, naming the rank,
  /// where a proof is wrong or `mine` is not what this rank has put there.
  Result<std::vector<std::string>> open(std::string_view round, int rank, std::string_view mine,
                                        const std::vector<std::string>& all) const;
  /// Both around `store.all_gather` under `key`; `round` is `key`.
  Result<std::vector<std::string>> all_gather(Store& store, const std::string& key, int rank,
                                              std::string_view text, Duration timeout) const;

 private:
  Secret::Proof proof_of(std::string_view round, int rank, std::string_view text) const;

  Secret secret_;
  std::string job_;
  int world_size_;
};

}  // namespace muster::store
