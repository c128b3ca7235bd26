// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/signed_texts.h"

#include <algorithm>

#include "core/base/bytes.h"

namespace muster::store {

Secret::Proof SignedTexts::proof_of(std::string_view round, int rank, std::string_view text) const {
  ByteWriter message;
  message.put_text("muster text in a store").put_text(job_).put_text(round);
  message.put(std::int32_t{world_size_}).put(std::int32_t{rank}).put_text(text);
  return secret_.prove(as_bytes(message.view()));
}

std::string SignedTexts::sign(std::string_view round, int rank, std::string_view text) const {
  const Secret::Proof proof = proof_of(round, rank, text);
  return std::string(as_text(proof)).append(text);
}

Result<std::vector<std::string>> SignedTexts::open(std::string_view round, int rank,
                                                   std::string_view mine,
                                                   const std::vector<std::string>& all) const {
  constexpr std::size_t kProofBytes = sizeof(Secret::Proof);
  std::vector<std::string> texts;
  for (std::size_t at = 0; at < all.size(); ++at) {
    const std::string_view put = all[at];
    const int who = static_cast<int>(at);
    if (who == rank && put != mine)
      return Status(Code::refused,
                    "the job's store gives back something else than this rank has put there: "
                    "somebody else writes into it",
                    {who});
    const std::string_view text = put.substr(std::min(put.size(), kProofBytes));
    if (put.size() < kProofBytes ||
        !equal_in_constant_time(as_bytes(put.substr(0, kProofBytes)), proof_of(round, who, text)))
      return Status(Code::refused,
                    "what rank " + std::to_string(who) +
                        " has put into the job's store carries no proof of this job's secret; set "
                        "the same MUSTER_SECRET on all ranks (without it all ranks must run on one "
                        "host as one user), unless somebody else writes into that store",
                    {who});
    texts.emplace_back(text);
  }
  return texts;
}

Result<std::vector<std::string>> SignedTexts::all_gather(Store& store, const std::string& key,
                                                         int rank, std::string_view text,
                                                         Duration timeout) const {
  const std::string mine = sign(key, rank, text);
  const auto all = store.all_gather(key, rank, world_size_, mine, timeout);
  if (!all) return all.status();
  return open(key, rank, mine, *all);
}

}  // namespace muster::store
