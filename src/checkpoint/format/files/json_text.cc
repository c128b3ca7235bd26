// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/files/json_text.h"

#include <cstdint>
#include <set>
#include <string>
#include <utility>

namespace muster::shards {
namespace {

using nlohmann::json;

constexpr int kMostNested = 500;  // limit: writing a value again takes stack for each level

/// Looks through a text before it is parsed. The library's own callback goes over all members of an
/// object for each of them.
class Survey final : public json::json_sax_t {
 public:
  const std::string& complaint() const { return complaint_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return enter(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    if (depth_ == 1 && !seen_.insert(name).second)
      return refuse("'" + name + "' stands twice in it");
    return true;
  }
  bool parse_error(std::size_t at, const std::string&, const json::exception&) override {
    return refuse("it is no JSON from byte " + std::to_string(at) + " on");
  }

 private:
  bool enter() {
    if (++depth_ > kMostNested)
      return refuse("it nests more than " + std::to_string(kMostNested) + " deep");
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }
  bool refuse(std::string why) {
    complaint_ = std::move(why);
    return false;
  }

  int depth_ = 0;
  std::set<std::string> seen_;
  std::string complaint_;
};

}  // namespace

Result<json> parse_object(std::string_view text) {
  Survey survey;
  if (!json::sax_parse(text.begin(), text.end(), &survey))
    return Status(Code::invalid_argument, survey.complaint());
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return Status(Code::invalid_argument, "it is no JSON object");
  return parsed;
}

}  // namespace muster::shards
