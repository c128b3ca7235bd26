// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/op.h"

#include <array>

namespace muster::collective {
namespace {

constexpr std::array<std::string_view, kReduces> kReduceNames{
    "SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "PREMUL_SUM"};

// Fingerprints also come from the wire, so numbers outside the tables are printed as numbers.
std::string op_text(std::uint8_t op) {
  return op < kOps ? std::string(kOpTable[op].name) : "operation " + std::to_string(op);
}
std::string reduce_text(std::uint8_t reduce) {
  return reduce < kReduces ? std::string(kReduceNames[reduce])
                           : "reduction " + std::to_string(reduce);
}
std::string dtype_text(std::uint8_t dtype) {
  return dtype < kDTypes ? std::string(name_of(static_cast<DType>(dtype)))
                         : "dtype " + std::to_string(dtype);
}

std::string encoding_text(int encoding) {
  constexpr std::array<std::string_view, 3> kNames{"bf16", "int8", "int4"};
  const auto index = static_cast<std::size_t>(encoding) - 1;
  return index < kNames.size() ? std::string(kNames[index])
                               : "encoding " + std::to_string(encoding);
}

class Rules final : public transport::FingerprintRules {
 public:
  // Fields that need not agree keep their defaults in a fingerprint (`call.h`).
  bool agree(const transport::Fingerprint& a, const transport::Fingerprint& b) const override {
    if (((a.flags | b.flags) & kRefused) != 0) return (a.flags & b.flags & kRefused) != 0;
    return a.op == b.op && a.dtype == b.dtype && a.reduce == b.reduce && a.root == b.root &&
           a.count == b.count && a.digest == b.digest &&
           a.flags >> kEncodingShift == b.flags >> kEncodingShift;
  }

  std::string describe(const transport::Fingerprint& call) const override {
    std::string text = op_text(call.op) + "(";
    if (call.op >= kOps) return text + ")";
    if ((call.flags & kRefused) != 0) return text + ") with arguments that were refused there";
    const OpInfo& row = kOpTable[call.op];
    if (row.size_rule == SizeRule::none) return text + ")";
    if (row.reduces) text += reduce_text(call.reduce) + ", ";
    text += dtype_text(call.dtype);
    const std::string noun = call.count == 1 ? " element" : " elements";
    if (row.size_rule == SizeRule::equal) text += ", " + std::to_string(call.count) + noun;
    if (row.size_rule == SizeRule::free && call.digest != 0) {
      text += ", " + std::to_string(call.count) + noun + " in all, split " +
              std::to_string(call.digest % 1'000'000);
    }
    if (row.size_rule != SizeRule::free && call.digest != 0)
      text += ", label " + std::to_string(call.digest % 1'000'000);
    if (row.rooted) text += ", root " + std::to_string(call.root);
    if (const int encoding = call.flags >> kEncodingShift; encoding != 0)
      text += ", in " + encoding_text(encoding);
    return text + ")";
  }
};

}  // namespace

std::string_view name_of(Reduce reduce) { return kReduceNames[static_cast<std::size_t>(reduce)]; }

bool reduce_supports(Reduce reduce, DType dtype, std::string* why) {
  const auto no = [&](const char* reason) {
    if (why != nullptr)
      *why = std::string(name_of(reduce)) + " is not defined on " + std::string(name_of(dtype)) +
             ": " + reason;
    return false;
  };
  if (!is_reducible(dtype)) return no("elements of this type can be moved but not reduced");
  switch (reduce) {
    case Reduce::band:
    case Reduce::bor:
    case Reduce::bxor:
      return is_integral(dtype) ? true : no("bit operations exist for integers and bool only");
    case Reduce::product:
    case Reduce::min:
    case Reduce::max:
      return is_complex(dtype) ? no("complex tensors have SUM, AVG and PREMUL_SUM only") : true;
    case Reduce::sum:
    case Reduce::avg:
    case Reduce::premul_sum: return true;
  }
  return no("no such reduction");
}

const transport::FingerprintRules& fingerprint_rules() {
  static const Rules rules;
  return rules;
}

}  // namespace muster::collective
