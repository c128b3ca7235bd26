/// Which save a checkpoint is: the first entry of its index, with a digest of its own, so that the
/// checkpoints of a folder are put in order without reading their indexes.
#pragma once

#include <compare>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "muster/status.h"

namespace muster::shards {

struct CommitRecord {
  std::optional<std::int64_t> step = {};
  /// Grows within the folder around the checkpoint; 0 in checkpoints of versions without it.
  std::int64_t number = 0;
  std::string token = {};  ///< drawn at random for each save
  std::string name = {};   ///< of the checkpoint's folder; another one is a copy
  std::string job = {};    ///< the job's name; empty: none
  /// Drawn at random for each launch of the job; empty: not told, or of versions without it.
  std::string launch = {};
  std::int64_t epoch = 0;         ///< of the launch; 0: none
  std::int64_t committed_ns = 0;  ///< only in checkpoints without a number

  /// The save that began later.
  bool is_later_than(const CommitRecord& other) const {
    return std::tie(number, token) > std::tie(other.number, other.token);
  }
  /// Whether `other` is of a later epoch of the same launch of the same job. Each launch counts its
  /// epochs from 1, so those of two launches say nothing of each other.
  bool is_older_epoch_than(const CommitRecord& other) const {
    return epoch > 0 && other.epoch > epoch && launch == other.launch && job == other.job;
  }
  /// "epoch 3 of job 'a'", or "another saver".
  std::string saver_text() const;
};

nlohmann::json json_of(const CommitRecord& record);
/// Refuses what does not fit its digest.
Result<CommitRecord> record_in(const nlohmann::json& commit);
/// Reads only the beginning of a checkpoint's index. Fails where that is altered. Checkpoints of
/// versions without a record have the time of their commit.
Result<CommitRecord> read_record(const std::string& folder);

}  // namespace muster::shards
