// SPDX-License-Identifier: BSD-3-Clause
// The calls a pass makes on the group, and the averages of small gradients.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "core/group/group_core.h"
#include "core/group/testing/ranks.h"
#include "core/trace/reader.h"
#include "train/ddp/reducer/reducer.h"

namespace muster::testing {
namespace {

using parallel::Reducer;
using Tensors = std::vector<at::Tensor>;

void run_pass(Reducer& reducer, const Tensors& parameters, const Tensors& gradients) {
  reducer.prepare_forward();
  auto loss = torch::zeros({}).requires_grad_() * 1;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    loss = loss + (parameters[i] * gradients[i]).sum();
  reducer.prepare_backward(std::array{loss});
  loss.backward();
}

/// This rank's calls of `name`, oldest first.
std::vector<trace::Record> calls_of(const std::string& name) {
  auto trace = trace::read_trace(core_of(default_group()).parts().recorder->path());
  EXPECT_TRUE(trace.ok());
  std::erase_if(trace->records, [&](const trace::Record& record) { return record.name != name; });
  return trace->records;
}

// If this thread has to drive the calls anyway, it makes them one after another, without a Work for
// each.
TEST(ReducerCalls, AreHandedOverOnlyWhereACoreIsFree) {
  on_ranks(2, [](int rank) {
    const Tensors parameters{torch::zeros({40}).requires_grad_(),
                             torch::zeros({50}).requires_grad_(),
                             torch::zeros({60}).requires_grad_()};
    Tensors gradients;
    for (const auto& parameter : parameters)
      gradients.push_back(torch::full(parameter.sizes(), rank + 1.0));
    const auto group = new_group();
    Reducer reducer(parameters, {.group = group, .in_place_bytes = 200});
    const bool full = core_of(group).manual_progress() != nullptr;
    const std::size_t before = calls_of("all_reduce").size();
    for (int pass = 0; pass < 2; ++pass) {
      for (const auto& parameter : parameters) parameter.mutable_grad().reset();
      run_pass(reducer, parameters, gradients);
      for (const auto& parameter : parameters)
        EXPECT_SAME(parameter.grad(), torch::full(parameter.sizes(), 1.5));
    }
    const auto calls = calls_of("all_reduce");
    ASSERT_EQ(calls.size() - before, 6U);
    for (std::size_t i = before; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i].async, !full);
      if (full && i > before) {
        EXPECT_GE(calls[i].start_ns, calls[i - 1].end_ns);
      }
    }
  });
}

// A language binding holds a lock around backward and releases it during waits.
TEST(ReducerCalls, AreMadeWhereTheFrameWaits) {
  on_ranks(2, [](int rank) {
    const Tensors parameters{torch::zeros({40}).requires_grad_(),
                             torch::zeros({50}).requires_grad_()};
    const Tensors gradients{torch::full({40}, rank + 1.0), torch::full({50}, rank + 2.0)};
    const auto group = new_group();
    if (core_of(group).manual_progress() == nullptr) return;  // they may start earlier
    std::size_t waits = 0, before = 0, after = 0;
    const auto wait_in = [&](const Group&, const std::function<void()>& wait) {
      before = calls_of("all_reduce").size();
      wait();
      after = calls_of("all_reduce").size();
      ++waits;
    };
    Reducer reducer(parameters,
                    {.group = group, .in_place_bytes = 1, .frame = {.wait_in = wait_in}});
    const std::size_t first = calls_of("all_reduce").size();
    run_pass(reducer, parameters, gradients);
    EXPECT_EQ(waits, 1U);
    EXPECT_EQ(before, first);
    EXPECT_EQ(after, first + 2);
    EXPECT_SAME(parameters[1].grad(), torch::full({50}, 2.5));
  });
}

// As in torch: each gradient is divided, then they are summed. Both layouts give bitwise equal
// results.
TEST(ReducerCalls, GiveSmallGradientsTheBitsOfTorchsOperators) {
  on_ranks(3, [](int rank) {
    const auto leaf = [](at::MemoryFormat format) {
      return torch::zeros({4, 3, 5, 2}).contiguous(format).requires_grad_();
    };
    const Tensors parameters{leaf(at::MemoryFormat::Contiguous),
                             leaf(at::MemoryFormat::ChannelsLast),
                             torch::zeros({}).requires_grad_()};
    const auto gradient_of = [&](int of, std::size_t index) {
      return torch::sin(torch::arange(parameters[index].numel()) + 31 * of +
                        static_cast<int>(index))
          .view(parameters[index].sizes());
    };
    Reducer reducer(parameters, {.group = new_group()});
    Tensors gradients;
    for (std::size_t i = 0; i < parameters.size(); ++i) gradients.push_back(gradient_of(rank, i));
    for (const bool otherwise : {false, true}) {
      // In the second pass the first parameter's gradient has another layout than its parameter.
      for (const auto& parameter : parameters) parameter.mutable_grad().reset();
      if (otherwise)
        parameters[0].mutable_grad() =
            torch::zeros({4, 3, 5, 2}).contiguous(at::MemoryFormat::ChannelsLast);
      run_pass(reducer, parameters, gradients);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto sum = gradient_of(0, i) * (1.0 / 3);
        for (const int other : {1, 2}) sum = sum + gradient_of(other, i) * (1.0 / 3);
        EXPECT_SAME(parameters[i].grad(), sum);
        EXPECT_GT(parameters[i].grad()._version(), 0) << "a change in place";
      }
    }
  });
}

}  // namespace
}  // namespace muster::testing
