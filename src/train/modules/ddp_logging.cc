// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/ddp_logging.h"

#include <set>
#include <utility>

#include "core/base/environment.h"
#include "core/base/log/log.h"

namespace muster::parallel {
namespace {

constexpr const char* kUnset = "N/A";

std::string from_environment(const char* name) { return env_text(name).value_or(kUnset); }

std::string first_of(const char* name, const char* other) {
  const auto text = env_text(name);
  return text ? *text : from_environment(other);
}

template <class List>
std::string joined(const List& list) {
  std::string text;
  for (const auto& each : list) text += (text.empty() ? "" : ", ") + std::to_string(each);
  return text.empty() ? kUnset : text;
}

std::string dtypes_of(const std::vector<at::Tensor>& parameters) {
  std::set<std::string> names;
  for (const at::Tensor& parameter : parameters) names.emplace(parameter.dtype().name());
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? kUnset : text;
}

bool on_several_devices(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters)
    if (parameter.device() != parameters.front().device()) return true;
  return false;
}

}  // namespace

std::string construction_block(const ConstructionFacts& facts) {
  std::size_t bytes = 0;
  for (const at::Tensor& parameter : facts.parameters) bytes += parameter.nbytes();
  const auto flag = [](bool on) { return std::string(on ? "1" : "0"); };
  const std::pair<const char*, std::string> fields[] = {
      {"broadcast_buffers", flag(facts.broadcast_buffers)},
      {"bucket_cap_bytes", std::to_string(facts.bucket_cap_bytes)},
      {"find_unused_parameters", flag(facts.find_unused_parameters)},
      {"gradient_as_bucket_view", flag(facts.gradient_as_bucket_view)},
      {"is_multi_device_module", flag(on_several_devices(facts.parameters))},
      {"iteration", "0"},
      {"num_parameter_tensors", std::to_string(facts.parameters.size())},
      {"output_device", facts.output_device ? std::to_string(*facts.output_device) : kUnset},
      {"rank", std::to_string(facts.rank)},
      {"total_parameter_size_bytes", std::to_string(bytes)},
      {"world_size", std::to_string(facts.world_size)},
      {"backend_name", facts.backend_name.empty() ? kUnset : facts.backend_name},
      {"bucket_sizes", joined(facts.bucket_sizes)},
      {"cuda_visible_devices", from_environment("CUDA_VISIBLE_DEVICES")},
      {"device_ids", facts.device_ids ? joined(*facts.device_ids) : kUnset},
      {"dtypes", dtypes_of(facts.parameters)},
      {"master_addr", from_environment("MASTER_ADDR")},
      {"master_port", from_environment("MASTER_PORT")},
      {"module_name", facts.module_name},
      {"nccl_async_error_handling",
       first_of("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")},
      {"nccl_blocking_wait", first_of("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")},
      {"nccl_debug", from_environment("NCCL_DEBUG")},
      {"nccl_ib_timeout", from_environment("NCCL_IB_TIMEOUT")},
      {"nccl_nthreads", from_environment("NCCL_NTHREADS")},
      {"nccl_socket_ifname", from_environment("NCCL_SOCKET_IFNAME")},
      {"torch_distributed_debug", get_debug_level() == DebugLevel::DETAIL ? "DETAIL"
                                  : get_debug_level() == DebugLevel::INFO ? "INFO"
                                                                          : "OFF"},
  };
  std::string text = "[Rank " + std::to_string(facts.rank) + "]: DDP Initialized with:";
  for (const auto& [name, value] : fields)
    text.append("\n").append(name).append(": ").append(value);
  return text;
}

void log_construction(const ConstructionFacts& facts) {
  if (get_debug_level() != DebugLevel::OFF && logs(LogLevel::info))
    log(LogLevel::info, construction_block(facts));
}

std::string module_name_of(const std::string& type_name) {
  std::size_t begin = 0;
  int depth = 0;  // of template arguments
  for (std::size_t i = 0; i < type_name.size(); ++i) {
    if (type_name[i] == '<') ++depth;
    if (type_name[i] == '>') --depth;
    if (type_name[i] == ':' && depth == 0) begin = i + 1;
  }
  std::string name = type_name.substr(begin);
  if (name.size() > 4 && name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

void RuntimeStatistics::add(const IterationTimes& times) {
  ++samples_;
  forward_ += times.backward_start - times.forward_start;
  backward_ += times.backward_end - times.backward_start;
  comm_ += times.comm_end - times.comm_start;
  overlap_ += std::max(Duration{0}, times.backward_end - times.comm_start);
}

std::string RuntimeStatistics::text(const std::string& module_name, int rank, int world_size,
                                    std::int64_t unused_bytes) const {
  const auto average = [this](Duration sum) {
    return std::to_string(samples_ > 0 ? sum.count() / samples_ : 0);
  };
  return "[Rank " + std::to_string(rank) + " / " + std::to_string(world_size) + "] Training " +
         module_name + " unused_parameter_size=" + std::to_string(unused_bytes) +
         "\n Avg forward compute time: " + average(forward_) +
         "\n Avg backward compute time: " + average(backward_) +
         "\nAvg backward comm. time: " + average(comm_) +
         "\n Avg backward comm/comp overlap time: " + average(overlap_);
}

}  // namespace muster::parallel
