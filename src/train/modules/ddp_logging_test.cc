// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/ddp_logging.h"

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <map>
#include <regex>
#include <string>

#include "core/base/log/log.h"
#include "core/group/testing/ranks.h"
#include "muster/parallel.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
using parallel::IterationTimes;
using parallel::module_name_of;
using parallel::RuntimeStatistics;

/// The network of torch's documentation.
struct TwoLinLayerNetImpl : nn::Module {
  TwoLinLayerNetImpl()
      : a(register_module("a", nn::Linear(nn::LinearOptions(10, 10).bias(false)))),
        b(register_module("b", nn::Linear(nn::LinearOptions(10, 1).bias(false)))) {}
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {a(x), b(x)}; }
  nn::Linear a, b;
};
TORCH_MODULE(TwoLinLayerNet);

/// Restores the levels.
class Levels {
 public:
  explicit Levels(DebugLevel debug) {
    set_debug_level(debug);
    set_log_level(LogLevel::info);
  }
  ~Levels() {
    set_debug_level(debug_);
    set_log_level(log_);
  }

 private:
  DebugLevel debug_ = get_debug_level();
  LogLevel log_ = log_level();
};

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* was = std::getenv(name)) before_ = was;
    value != nullptr ? ::setenv(name, value, 1) : ::unsetenv(name);
  }
  ~Variable() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

std::string trained(int ranks, int steps, DebugLevel level) {
  const Levels levels(level);
  ::testing::internal::CaptureStderr();
  on_ranks(ranks, [&](int) {
    TwoLinLayerNet net;
    DistributedDataParallel<TwoLinLayerNet> model(net);
    for (int step = 0; step < steps; ++step) {
      const auto [a, b] = model(torch::ones({4, 10}));
      (a.sum() + b.sum()).backward();
    }
  });
  return ::testing::internal::GetCapturedStderr();
}

// spec: H3 the DDP block at construction
// spec: H12 the documents' two-layer net, what is unset is N/A
TEST(DdpLogging, TheBlockOfTheDocumentsNetIsTheDocuments) {
  const Variable address("MASTER_ADDR", "localhost"), port("MASTER_PORT", "29501"),
      debug("NCCL_DEBUG", "WARN"), devices("CUDA_VISIBLE_DEVICES", nullptr),
      handling("TORCH_NCCL_ASYNC_ERROR_HANDLING", nullptr),
      old_handling("NCCL_ASYNC_ERROR_HANDLING", nullptr), wait("TORCH_NCCL_BLOCKING_WAIT", nullptr),
      old_wait("NCCL_BLOCKING_WAIT", nullptr), ib("NCCL_IB_TIMEOUT", nullptr),
      threads("NCCL_NTHREADS", nullptr), interface("NCCL_SOCKET_IFNAME", nullptr);
  const Levels levels(DebugLevel::INFO);
  TwoLinLayerNet net;
  // As on the two GPUs of the documentation.
  const parallel::ConstructionFacts facts{.module_name = module_name_of(net->name()),
                                          .rank = 0,
                                          .world_size = 2,
                                          .backend_name = "nccl",
                                          .bucket_cap_bytes = 26214400,
                                          .device_ids = std::vector<int>{0},
                                          .output_device = 0,
                                          .parameters = net->parameters(),
                                          .bucket_sizes = {440}};
  EXPECT_EQ(parallel::construction_block(facts), R"([Rank 0]: DDP Initialized with:
broadcast_buffers: 1
bucket_cap_bytes: 26214400
find_unused_parameters: 0
gradient_as_bucket_view: 0
is_multi_device_module: 0
iteration: 0
num_parameter_tensors: 2
output_device: 0
rank: 0
total_parameter_size_bytes: 440
world_size: 2
backend_name: nccl
bucket_sizes: 440
cuda_visible_devices: N/A
device_ids: 0
dtypes: float
master_addr: localhost
master_port: 29501
module_name: TwoLinLayerNet
nccl_async_error_handling: N/A
nccl_blocking_wait: N/A
nccl_debug: WARN
nccl_ib_timeout: N/A
nccl_nthreads: N/A
nccl_socket_ifname: N/A
torch_distributed_debug: INFO)");
}

// spec: H3 at INFO, at construction
// spec: H12 the block, for a model on the CPU
TEST(DdpLogging, EachRankLogsItsBlockAtInfo) {
  const Variable devices("CUDA_VISIBLE_DEVICES", nullptr), debug("NCCL_DEBUG", nullptr);
  const auto text = trained(2, 1, DebugLevel::INFO);
  for (const char* rank : {"0", "1"}) {
    const auto begin =
        text.find(std::string("[Rank ") + rank +
                  "]: DDP Initialized with:\nbroadcast_buffers: 1\nbucket_cap_bytes: 26214400\n");
    ASSERT_NE(begin, std::string::npos) << text;
    const auto block =
        text.substr(begin, text.find("torch_distributed_debug: INFO", begin) - begin);
    for (const std::string& line :
         {std::string("num_parameter_tensors: 2"), std::string("total_parameter_size_bytes: 440"),
          std::string("bucket_sizes: 440"), std::string("dtypes: float"),
          std::string("world_size: 2"), "rank: " + std::string(rank),
          std::string("module_name: TwoLinLayerNet"), std::string("output_device: N/A"),
          std::string("device_ids: N/A"), std::string("cuda_visible_devices: N/A"),
          std::string("nccl_debug: N/A")})
      EXPECT_HAS(block, "\n" + line + "\n");
  }
  EXPECT_EQ(text.find("Training"), std::string::npos) << "that is for DETAIL: " << text;
  EXPECT_EQ(trained(1, 1, DebugLevel::OFF).find("DDP Initialized"), std::string::npos);
}

// spec: H4 at sampled iterations
// spec: H12 H4's labels
TEST(DdpLogging, DetailSaysWhereTheTimeGoes) {
  const auto text = trained(2, 13, DebugLevel::DETAIL);
  EXPECT_HAS(text, "[Rank 1]: DDP Initialized with:");
  const std::regex line(
      "\\[Rank 1 / 2\\] Training TwoLinLayerNet unused_parameter_size=0\n Avg forward compute "
      "time: (\\d+)\n Avg backward compute time: "
      "(\\d+)\nAvg backward comm. time: (\\d+)\n Avg backward comm/comp overlap time: (\\d+)\n");
  int lines = 0;
  for (auto found = std::sregex_iterator(text.begin(), text.end(), line);
       found != std::sregex_iterator(); ++found) {
    ++lines;
    for (int field = 1; field <= 3; ++field)
      EXPECT_GT(std::stoll((*found)[field]), 0) << "field " << field;
    EXPECT_LE(std::stoll((*found)[4]), std::stoll((*found)[3]))
        << "the overlap is a part of the communication";
  }
  EXPECT_EQ(lines, 10) << "the first ten of thirteen: " << text;
}

TEST(DdpLogging, UnusedParametersAndTheRateAreSeen) {
  const Levels levels(DebugLevel::DETAIL);
  ::testing::internal::CaptureStderr();
  on_ranks(1, [](int) {
    DistributedDataParallel<TwoLinLayerNet> model(TwoLinLayerNet{},
                                                  {.find_unused_parameters = true});
    model.set_runtime_logging_sample_rate(3);
    for (int step = 0; step < 13; ++step) {
      const auto used = model(torch::ones({4, 10})).second;
      used.sum().backward();
    }
    model.module()->a->weight.requires_grad_(false);
    EXPECT_HAS(message_of<DistError>([&] { model.set_runtime_logging_sample_rate(0); }),
               "at least 1");
  });
  const auto text = ::testing::internal::GetCapturedStderr();
  std::size_t lines = 0;
  for (std::size_t at = text.find("Training TwoLinLayerNet"); at != std::string::npos;
       at = text.find("Training TwoLinLayerNet", at + 1))
    ++lines;
  EXPECT_EQ(lines, 11u) << "ten, and the twelfth: " << text;
}

struct LeavesOutImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return used(x); }
  nn::Linear used{register_module("used", nn::Linear(2, 1))},
      left_out{register_module("left_out", nn::Linear(3, 5))};
};
TORCH_MODULE(LeavesOut);

TEST(DdpLogging, BytesOfParametersThatWereLeftOut) {
  const Levels levels(DebugLevel::DETAIL);
  ::testing::internal::CaptureStderr();
  on_ranks(1, [](int) {
    DistributedDataParallel<LeavesOut> model(LeavesOut{}, {.find_unused_parameters = true});
    model(torch::ones({4, 2})).sum().backward();
  });
  EXPECT_HAS(::testing::internal::GetCapturedStderr(),
             "unused_parameter_size=" + std::to_string(4 * (3 * 5 + 5)) + "\n");
}

TEST(DdpLogging, AveragesAreThoseOfTheSamples) {
  RuntimeStatistics statistics;
  const TimePoint zero{};
  const auto at = [&](int nanoseconds) { return zero + std::chrono::nanoseconds(nanoseconds); };
  statistics.add({.forward_start = at(0),
                  .backward_start = at(10),
                  .comm_start = at(14),
                  .backward_end = at(20),
                  .comm_end = at(30)});
  statistics.add({.forward_start = at(0),
                  .backward_start = at(20),
                  .comm_start = at(40),
                  .backward_end = at(50),
                  .comm_end = at(60)});
  EXPECT_EQ(statistics.text("Net", 3, 8, 16),
            "[Rank 3 / 8] Training Net unused_parameter_size=16\n Avg forward compute time: 15\n "
            "Avg backward compute time: 20\nAvg backward "
            "comm. time: 18\n Avg backward comm/comp overlap time: 8");
  EXPECT_TRUE(statistics.samples(1) && statistics.samples(10) && statistics.samples(100) &&
              statistics.samples(200));
  EXPECT_FALSE(statistics.samples(11) || statistics.samples(99) || statistics.samples(101));
}

TEST(DdpLogging, ModulesAreCalledAsInPython) {
  EXPECT_EQ(module_name_of("torch::nn::LinearImpl"), "Linear");
  EXPECT_EQ(module_name_of("muster::(anonymous namespace)::NetImpl"), "Net");
  EXPECT_EQ(module_name_of("app::Wrapper<torch::nn::Linear>"), "Wrapper<torch::nn::Linear>");
  EXPECT_EQ(module_name_of("Impl"), "Impl");
}

}  // namespace
}  // namespace muster::testing
