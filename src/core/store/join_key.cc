#include "core/store/join_key.h"

#include "core/security/secret.h"

namespace muster::store {
namespace {

constexpr std::string_view kJoinPrefix = "muster/join/";

}  // namespace

std::string join_key(const std::string& scope, const std::string& group_name) {
  return std::string(kJoinPrefix) + scope + "/" + group_name;
}

bool is_join_key(std::string_view key) { return key.starts_with(kJoinPrefix); }

std::string job_of(std::string_view join_key, std::string_view all_tokens) {
  const std::string_view group_name = join_key.substr(join_key.find('/', kJoinPrefix.size()) + 1);
  return std::string(group_name.empty() ? "job" : group_name) + "-" +
         hexadecimal(short_hash(all_tokens));
}

}  // namespace muster::store
