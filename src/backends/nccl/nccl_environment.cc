// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/nccl_environment.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

#include "core/base/environment.h"
#include "core/group/errors.h"

namespace muster::nccl {
namespace {

/// A flag that asks for what the backend does not do.
struct RefusedFlag {
  const char* name;
  const char* why;
};
constexpr RefusedFlag kRefused[] = {
    {"NCCL_COMM_BLOCKING", "it must be able to abort NCCL's calls, which then block"},
    {"TORCH_NCCL_NAN_CHECK", "it does not look for NaN in tensors"},
    {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "it registers no memory with NCCL"},
};

/// The others that mean something here (communicator.cc reads the priority), or that choose between
/// ways of torch's that are alike in all that a program sees.
constexpr std::string_view kUsed[] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_RANKS_PER_ROOT",       "TORCH_NCCL_HIGH_PRIORITY",
    "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_CUDA_EVENT_CACHE",
    "TORCH_NCCL_USE_COMM_NONBLOCKING",
};

/// In two pieces, since it is the name of no variable.
constexpr std::string_view kPrefix =
    "TORCH_"
    "NCCL_";

bool is_known(std::string_view name) {
  return std::ranges::find(kUsed, name) != std::end(kUsed) ||
         std::ranges::any_of(kRefused, [&](const RefusedFlag& row) { return name == row.name; });
}

}  // namespace

Environment Environment::read() {
  Environment read;
  const auto number = [](const char* name, std::int64_t high) {
    return group::take(env_integer(name, 0, high));
  };
  auto handling = number("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3);
  if (!handling) handling = number("NCCL_ASYNC_ERROR_HANDLING", 3);
  if (handling) read.handling = static_cast<ErrorHandling>(*handling);
  auto blocking = number("TORCH_NCCL_BLOCKING_WAIT", 1);
  if (!blocking) blocking = number("NCCL_BLOCKING_WAIT", 1);
  read.blocking_wait = blocking.value_or(0) == 1;
  if (!handling && read.blocking_wait) read.handling = ErrorHandling::abort;
  read.ranks_per_id = static_cast<int>(
      group::take(env_integer("TORCH_NCCL_RANKS_PER_ROOT", 1, std::numeric_limits<int>::max()))
          .value_or(read.ranks_per_id));
  read.may_share_devices = number("NCCL_MULTI_RANK_GPU_ENABLE", 1).value_or(0) == 1;
  for (const auto& row : kRefused)
    if (group::take(env_flag(row.name)).value_or(false))
      group::invalid("backend 'nccl' cannot do what " + std::string(row.name) +
                     "=1 asks for: " + row.why + "; unset it");
  return read;
}

std::vector<std::string> Environment::unused() {
  std::vector<std::string> names;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const auto name = text.substr(0, text.find('='));
    const bool is_empty = name.size() + 1 >= text.size();
    if (name.starts_with(kPrefix) && !is_empty && !is_known(name)) names.emplace_back(name);
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace muster::nccl
