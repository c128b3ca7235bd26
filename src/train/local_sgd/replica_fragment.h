// SPDX-License-Identifier: BSD-3-Clause
/// What replicas average in one meeting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/hash.h"
#include "muster/local_sgd.h"
#include "muster/work.h"

namespace muster::parallel {

inline std::int64_t hash_of_bits(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.cpu().contiguous();
  return static_cast<std::int64_t>(
      hash_of({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()}));
}

/// Parameters that meet together.
struct ReplicaMeetings::Fragment {
  /// Those of one dtype and device, which one call averages.
  struct MeetingPart {
    std::vector<std::size_t> numbers;
    std::int64_t elements = 0;
    at::Tensor rests;    // error feedback; undefined: none
    at::Tensor average;  // of the meeting that goes on
    WorkRef work;        // null: done
  };
  std::vector<MeetingPart> parts;
  std::int64_t offset = 0;    // it meets in steps with this remainder
  std::int64_t due = -1;      // the step that takes the average; -1: no meeting goes on
  std::int64_t revision = 0;  // meetings whose average has been taken
  std::int64_t tokens = 0;    // of this member, since it last met
  // In the meeting that goes on: of this member, and once compared of all.
  std::int64_t tokens_sent = 0, tokens_of_all = 0;
  // All members' revision and hash of their outer parameters, tokens, and what they say of those
  // that join.
  at::Tensor digests;
  at::Tensor words;    // the last of these, once all is known
  WorkRef comparison;  // which gathers these; null: done

  std::vector<std::size_t> numbers() const {
    std::vector<std::size_t> all;
    for (const MeetingPart& part : parts)
      all.insert(all.end(), part.numbers.begin(), part.numbers.end());
    return all;
  }
};

}  // namespace muster::parallel
