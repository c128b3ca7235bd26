// SPDX-License-Identifier: BSD-3-Clause
/// The table of operations, shared by selection, logs, errors, Python, the flight recorder and the
/// fingerprint.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "core/transport/channel/fingerprint.h"
#include "muster/op.h"

namespace muster::collective {

using muster::Op;
inline constexpr int kOps = 11;

enum class Reduce : std::uint8_t { sum, product, min, max, band, bor, bxor, avg, premul_sum };
inline constexpr int kReduces = 9;
constexpr Reduce engine_reduce(const ReduceOp& op) { return static_cast<Reduce>(op.kind()); }
static_assert(engine_reduce(ReduceOp::PREMUL_SUM) == Reduce::premul_sum);
static_assert(engine_reduce(ReduceOp::BAND) == Reduce::band);

/// In `Fingerprint::flags`: the member could not execute the call because of its arguments. It
/// still counts as a call.
inline constexpr std::uint8_t kRefused = 1;
/// From this bit on: how the values travel (quantized/block_codec.h). 0: as they are; otherwise the
/// number of a BlockFormat, from 1.
inline constexpr int kEncodingShift = 4;

/// How the members' sizes relate.
enum class SizeRule : std::uint8_t {
  equal,  ///< every member passes the same number of elements
  free,   ///< sizes may differ between members
  none,   ///< no data
};

struct OpInfo {
  std::string_view name;  ///< torch's name, such as "all_reduce"
  bool rooted;
  bool reduces;
  bool lists_input;   ///< one input slice per member
  bool lists_output;  ///< one output slice per member
  SizeRule size_rule;
};
inline constexpr std::array<OpInfo, kOps> kOpTable{{
    //  name            rooted reduces lists_input lists_output size_rule
    {"broadcast", true, false, false, false, SizeRule::equal},
    {"all_reduce", false, true, false, false, SizeRule::equal},
    {"reduce", true, true, false, false, SizeRule::equal},
    {"all_gather", false, false, false, true, SizeRule::free},
    {"gather", true, false, false, true, SizeRule::equal},
    {"scatter", true, false, true, false, SizeRule::equal},
    {"reduce_scatter", false, true, true, false, SizeRule::free},
    {"all_to_all", false, false, true, true, SizeRule::free},
    {"barrier", false, false, false, false, SizeRule::none},
    {"send", false, false, false, false, SizeRule::free},
    {"recv", false, false, false, false, SizeRule::free},
}};
inline const OpInfo& info(Op op) { return kOpTable[static_cast<std::size_t>(op)]; }
using muster::is_message;
/// torch's names, such as "SUM" and "PREMUL_SUM".
std::string_view name_of(Reduce reduce);
/// Whether `reduce` is defined on `dtype`. If not, `why` receives the reason for the error text.
bool reduce_supports(Reduce reduce, DType dtype, std::string* why = nullptr);

/// The rules of this table for the transport. Never destroyed.
const transport::FingerprintRules& fingerprint_rules();

}  // namespace muster::collective
