// SPDX-License-Identifier: BSD-3-Clause
// The all_reduce of encoded values.
#include <utility>

#include "core/collective/links/link_group.h"
#include "core/collective/plan/plan.h"
#include "core/collective/quantized/piece_sums.h"
#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster::collective {

// Every member encodes its values of each piece for the piece's owner, which sums them and sends
// the sums to all. A message is posted as soon as it is encoded, and all receives are posted after
// the first, so that the links always have something to send: their delay counts twice for the
// whole call and not for each piece. Between two pieces of work the thread serves its links.
Task<Status> LinkGroup::all_reduce_in_pieces(const Args& args) {
  enum PieceMessage : std::uint64_t { kPieceValues, kPieceSums };
  constexpr int kPieces = static_cast<int>(fixed::kEncodedPieces);
  // Slot k has the values of piece k, slot kPieces + k its sums.
  constexpr int kDepartures = 2 * kPieces;
  static_assert(kDepartures < OutstandingTransfers::kSlots);
  PieceSums& sums = *args.pieces;
  const plan::PairwisePlan peers{rank_, size_};
  const int pieces = sums.pieces();
  int encoded = 0, summed = 0, decoded = 0;

  const auto await_all = [&] {
    for (int piece = 0; piece < pieces; ++piece) {
      for (int step = 1; step <= peers.steps(); ++step) {
        const int from = peers.source(step);
        outstanding_.receive(piece, from, kPieceValues, sums.values_from(from, piece));
        outstanding_.receive(kPieces + piece, from, kPieceSums, sums.sums_from(from, piece));
      }
    }
  };
  const auto encode = [&] {
    for (int step = 1; step <= peers.steps(); ++step) {
      const int to = peers.target(step);
      outstanding_.send(kDepartures, to, kPieceValues, sums.encode(to, encoded));
    }
    if (encoded == 0) await_all();
    ++encoded;
  };
  const auto sum = [&] {
    const ConstBytes own = sums.sum(summed);
    for (int step = 1; step <= peers.steps(); ++step)
      outstanding_.send(kDepartures, peers.target(step), kPieceSums, own);
    ++summed;
  };
  const auto decode = [&] {
    for (int member = 0; member < size_; ++member) sums.decode(member, decoded);
    ++decoded;
  };
  const auto can_sum = [&] { return summed < encoded && outstanding_.done(summed); };
  const auto can_decode = [&] { return decoded < summed && outstanding_.done(kPieces + decoded); };

  bool paused = false;
  while (decoded < pieces) {
    co_await until(
        [&] { return encoded < pieces || can_sum() || can_decode() || !outstanding_.ok(); });
    if (!outstanding_.ok()) break;
    if (encoded < pieces) {
      encode();
    } else if (can_sum()) {
      // A transfer that failed counts as done.
      if (outstanding_.ok()) sum();
    } else if (outstanding_.ok()) {
      decode();
    }
    note_progress();  // there may be more to do: the thread must not sleep
    co_await until([&paused] { return std::exchange(paused, !paused); });
  }
  co_return co_await finish();
}

}  // namespace muster::collective
