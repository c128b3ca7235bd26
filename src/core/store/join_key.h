/// How the keys are named at which ranks meet to join a job: stores keep what stands there from
/// others, and count who has joined.
#pragma once

#include <string>
#include <string_view>

namespace muster::store {

/// The key under which the ranks meet to join, and the job's name derived from the tokens all of
/// them contributed.
std::string join_key(const std::string& scope, const std::string& group_name);
bool is_join_key(std::string_view key);
std::string job_of(std::string_view join_key, std::string_view all_tokens);

}  // namespace muster::store
