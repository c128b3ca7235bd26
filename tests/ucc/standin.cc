// SPDX-License-Identifier: BSD-3-Clause
// A stand-in for libucc: every function that muster calls, over the allgather that muster gives a
// team. The members of a team exchange all of their inputs, one collective after another, and each
// works out its own results. As with UCC, a collective goes on while ucc_context_progress runs.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <vector>

#include "backends/ucc/api.h"

namespace muster::ucc {

struct UccLib {};
struct UccContext {};

namespace {

using Bytes = std::vector<std::byte>;

std::size_t width_of(UccType type) {
  switch (type) {
    case UccType::int8:
    case UccType::uint8: return 1;
    case UccType::int16:
    case UccType::uint16: return 2;
    case UccType::int64:
    case UccType::uint64:
    case UccType::float64: return 8;
    default: return 4;
  }
}

template <class T>
T combined(UccOp op, T a, T b) {
  // Integers wrap around.
  using Wide = std::conditional_t<std::is_integral_v<T>, std::uint64_t, T>;
  switch (op) {
    case UccOp::prod: return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    case UccOp::max: return std::max(a, b);
    case UccOp::min: return std::min(a, b);
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == UccOp::band) return static_cast<T>(a & b);
    if (op == UccOp::bor) return static_cast<T>(a | b);
    if (op == UccOp::bxor) return static_cast<T>(a ^ b);
  }
  return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
}

template <class T>
void combine_as(UccOp op, std::byte* out, const std::byte* in, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(T)) {
    T a, b;
    std::memcpy(&a, out + at, sizeof a);
    std::memcpy(&b, in + at, sizeof b);
    a = combined(op, a, b);
    std::memcpy(out + at, &a, sizeof a);
  }
}

void combine(UccOp op, UccType type, std::byte* out, const std::byte* in, std::size_t bytes) {
  switch (type) {
    case UccType::int8: return combine_as<std::int8_t>(op, out, in, bytes);
    case UccType::uint8: return combine_as<std::uint8_t>(op, out, in, bytes);
    case UccType::int16: return combine_as<std::int16_t>(op, out, in, bytes);
    case UccType::uint16: return combine_as<std::uint16_t>(op, out, in, bytes);
    case UccType::int32: return combine_as<std::int32_t>(op, out, in, bytes);
    case UccType::uint32: return combine_as<std::uint32_t>(op, out, in, bytes);
    case UccType::int64: return combine_as<std::int64_t>(op, out, in, bytes);
    case UccType::uint64: return combine_as<std::uint64_t>(op, out, in, bytes);
    case UccType::float32: return combine_as<float>(op, out, in, bytes);
    case UccType::float64: return combine_as<double>(op, out, in, bytes);
  }
}

void append(Bytes& to, const void* data, std::size_t bytes) {
  const auto* const from = static_cast<const std::byte*>(data);
  if (bytes > 0) to.insert(to.end(), from, from + bytes);
}

void copy(void* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

/// One allgather of as many bytes from each.
struct StandinExchange {
  Bytes mine, all;
  void* request = nullptr;
  void begin(const UccOob& oob) {
    all.resize(mine.size() * oob.members);
    oob.allgather(mine.data(), all.data(), mine.size(), oob.info, &request);
  }
  UccStatus test(const UccOob& oob) const {
    const UccStatus status = oob.test(request);
    if (status != kInProgress) oob.free(request);
    return status;
  }
};

struct Call : UccRequest {
  UccArgs args{};
  UccTeam* team = nullptr;
  Bytes given;
  StandinExchange sizes, contents;
};

}  // namespace

struct UccTeam {
  UccOob oob{};
  StandinExchange greeting;
  UccStatus made = kInProgress;
  std::deque<Call*> posted;  // the front one is exchanged
};

namespace {

std::vector<UccTeam*> teams;

bool in_place(const UccArgs& args) { return (args.flags & kInPlace) != 0; }

/// A list's slices, after their lengths.
Bytes pack(const UccBufferV& list, std::uint32_t members) {
  Bytes packed;
  append(packed, list.counts, members * sizeof(std::uint64_t));
  const std::size_t width = width_of(list.type);
  for (std::uint32_t i = 0; i < members; ++i)
    append(packed, static_cast<std::byte*>(list.data) + list.places[i] * width,
           list.counts[i] * width);
  return packed;
}

/// The slice that packed ones hold for `member`: where it begins, and its length.
std::pair<const std::byte*, std::size_t> slice(const Bytes& packed, const UccOob& oob,
                                               std::size_t width) {
  std::vector<std::uint64_t> counts(oob.members);
  std::memcpy(counts.data(), packed.data(), counts.size() * sizeof(std::uint64_t));
  const auto before = std::accumulate(counts.begin(), counts.begin() + oob.rank, std::uint64_t{0});
  return {packed.data() + counts.size() * sizeof(std::uint64_t) + before * width,
          counts[oob.rank] * width};
}

Bytes given_by(const UccArgs& args, const UccOob& oob) {
  const UccBuffer& in = args.in.whole;
  const std::size_t bytes = in.count * width_of(in.type);
  const bool is_root = args.root == oob.rank;
  Bytes given;
  switch (args.coll) {
    case UccColl::barrier: break;
    case UccColl::bcast:
      if (is_root) append(given, in.data, bytes);
      break;
    case UccColl::allreduce:
    case UccColl::reduce:
      append(given, in_place(args) ? args.out.whole.data : in.data, bytes);
      break;
    case UccColl::allgather:
    case UccColl::gather:
      append(given,
             in_place(args) ? static_cast<std::byte*>(args.out.whole.data) + oob.rank * bytes
                            : in.data,
             bytes);
      break;
    case UccColl::reduce_scatterv: append(given, in.data, bytes); break;
    case UccColl::scatterv:
      if (is_root) given = pack(args.in.list, oob.members);
      break;
    case UccColl::alltoallv: given = pack(args.in.list, oob.members); break;
  }
  return given;
}

/// Reduces `bytes` bytes of all inputs, from byte `from` on.
void reduce(const UccArgs& args, const std::vector<Bytes>& all, std::size_t from,
            std::size_t bytes) {
  if (bytes == 0) return;
  Bytes result(all[0].begin() + static_cast<std::ptrdiff_t>(from),
               all[0].begin() + static_cast<std::ptrdiff_t>(from + bytes));
  for (std::size_t i = 1; i < all.size(); ++i)
    combine(args.op, args.in.whole.type, result.data(), all[i].data() + from, bytes);
  std::memcpy(args.out.whole.data, result.data(), bytes);
}

void finish(const UccArgs& args, const UccOob& oob, const std::vector<Bytes>& all) {
  const bool is_root = args.root == oob.rank;
  auto* const out = static_cast<std::byte*>(args.out.whole.data);
  switch (args.coll) {
    case UccColl::barrier: return;
    case UccColl::bcast:
      return copy(args.in.whole.data, all[args.root].data(), all[args.root].size());
    case UccColl::reduce:
      if (!is_root) return;
      [[fallthrough]];
    case UccColl::allreduce: return reduce(args, all, 0, all[0].size());
    case UccColl::gather:
      if (!is_root) return;
      [[fallthrough]];
    case UccColl::allgather:
      for (std::size_t i = 0; i < all.size(); ++i)
        copy(out + i * all[i].size(), all[i].data(), all[i].size());
      return;
    case UccColl::reduce_scatterv: {
      const std::uint64_t* const counts = args.out.list.counts;
      const std::size_t width = width_of(args.out.list.type);
      const auto before = std::accumulate(counts, counts + oob.rank, std::uint64_t{0});
      return reduce(args, all, before * width, counts[oob.rank] * width);
    }
    case UccColl::scatterv: {
      const auto [data, bytes] = slice(all[args.root], oob, width_of(args.out.whole.type));
      if (!in_place(args)) copy(out, data, bytes);
      return;
    }
    case UccColl::alltoallv: {
      const std::size_t width = width_of(args.out.list.type);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto [data, bytes] = slice(all[i], oob, width);
        copy(out + args.out.list.places[i] * width, data, bytes);
      }
    }
  }
}

std::vector<std::uint64_t> sizes_of(const StandinExchange& exchange, const UccOob& oob) {
  std::vector<std::uint64_t> sizes(oob.members);
  std::memcpy(sizes.data(), exchange.all.data(), exchange.all.size());
  return sizes;
}

/// The lengths of all inputs, then the inputs, each filled up to the longest.
UccStatus advance(Call& call) {
  const UccOob& oob = call.team->oob;
  if (call.sizes.mine.empty()) {
    const std::uint64_t size = call.given.size();
    append(call.sizes.mine, &size, sizeof size);
    call.sizes.begin(oob);
  }
  if (call.contents.mine.empty()) {
    if (const UccStatus status = call.sizes.test(oob); status != kOk) return status;
    const auto sizes = sizes_of(call.sizes, oob);
    call.contents.mine = call.given;
    call.contents.mine.resize(std::max<std::size_t>(1, *std::ranges::max_element(sizes)));
    call.contents.begin(oob);
  }
  if (const UccStatus status = call.contents.test(oob); status != kOk) return status;
  const auto sizes = sizes_of(call.sizes, oob);
  std::vector<Bytes> all;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto* const from = call.contents.all.data() + i * call.contents.mine.size();
    all.emplace_back(from, from + sizes[i]);
  }
  finish(call.args, oob, all);
  return kOk;
}

}  // namespace

#define STANDIN extern "C" __attribute__((visibility("default")))

STANDIN void ucc_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1;
  *minor = STANDIN_MINOR;
  *release = 0;
}
STANDIN const char* ucc_status_string(UccStatus) { return "an error of the stand-in"; }
STANDIN UccStatus ucc_lib_config_read(const char*, const char*, UccLibConfig**) { return kOk; }
STANDIN void ucc_lib_config_release(UccLibConfig*) {}
STANDIN UccStatus ucc_init_version(unsigned, unsigned, const UccLibParams*, UccLibConfig*,
                                   UccLib** lib) {
  static UccLib only;
  *lib = &only;
  return kOk;
}
STANDIN UccStatus ucc_context_config_read(UccLib*, const char*, UccContextConfig**) { return kOk; }
STANDIN void ucc_context_config_release(UccContextConfig*) {}
STANDIN UccStatus ucc_context_create(UccLib*, const UccContextParams*, UccContextConfig*,
                                     UccContext** context) {
  static UccContext only;
  *context = &only;
  return kOk;
}
STANDIN UccStatus ucc_context_progress(UccContext*) {
  for (UccTeam* const team : teams) {
    while (!team->posted.empty()) {
      Call& front = *team->posted.front();
      front.status = advance(front);
      if (front.status == kInProgress) break;
      team->posted.pop_front();
    }
  }
  return kOk;
}
STANDIN UccStatus ucc_team_create_post(UccContext**, std::uint32_t, const UccTeamParams* params,
                                       UccTeam** team) {
  *team = new UccTeam{.oob = params->oob, .greeting = {}, .posted = {}};
  (*team)->greeting.mine.resize(1);
  (*team)->greeting.begin(params->oob);
  teams.push_back(*team);
  return kOk;
}
STANDIN UccStatus ucc_team_create_test(UccTeam* team) {
  if (team->made == kInProgress) team->made = team->greeting.test(team->oob);
  return team->made;
}
STANDIN UccStatus ucc_team_destroy(UccTeam* team) {
  std::erase(teams, team);
  delete team;
  return kOk;
}
STANDIN UccStatus ucc_collective_init(UccArgs* args, UccRequest** request, UccTeam* team) {
  auto call = std::make_unique<Call>();
  call->status = 2;  // initialised
  call->args = *args;
  call->team = team;
  *request = call.release();
  return kOk;
}
STANDIN UccStatus ucc_collective_post(UccRequest* request) {
  auto* const call = static_cast<Call*>(request);
  call->given = given_by(call->args, call->team->oob);
  call->status = kInProgress;
  call->team->posted.push_back(call);
  return kOk;
}
STANDIN UccStatus ucc_collective_finalize(UccRequest* request) {
  delete static_cast<Call*>(request);
  return kOk;
}

}  // namespace muster::ucc
