// SPDX-License-Identifier: BSD-3-Clause
// Fuzzers of what workers read from each other in terms of tensors and types; those of the messages
// around it: message_test.cc, rref_protocol_test.cc.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <cereal/types/map.hpp>
#include <map>
#include <memory>
#include <semaphore>
#include <tuple>

#include "muster/rref.h"
#include "rpc/agent/agent.h"
#include "rpc/agent/worker_table.h"
#include "rpc/autograd/autograd_context.h"
#include "rpc/autograd/autograd_pass.h"
#include "rpc/rref/rref_context.h"
#include "rpc/testing/workers.h"
#include "testing/fuzz.h"

namespace muster::rpc {
namespace {

using muster::testing::Fuzz;
using muster::testing::fuzz_for_a_while;

struct Nested {
  std::map<std::string, std::vector<at::Tensor>> tensors;
  std::vector<std::int64_t> numbers;
  std::string text;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(tensors, numbers, text);
  }
};

TEST(RpcValue, NestedObjectsKeepTheirTensors) {
  Nested nested{
      {{"a", {torch::ones({2}), at::Tensor(), torch::zeros({3})}}, {"b", {}}}, {1, 2, 3}, "text"};
  Value value;
  ValueDelivery delivery;
  pack(value, delivery, nested);
  EXPECT_EQ(value.tensors.size(), 2U);  // one of the three is none
  const auto back = unpack<Nested>(value, delivery);
  ASSERT_EQ(back.tensors.at("a").size(), 3U);
  EXPECT_TRUE(torch::equal(back.tensors.at("a")[2], torch::zeros({3})));
  EXPECT_FALSE(back.tensors.at("a")[1].defined());
  EXPECT_EQ(back.numbers, nested.numbers);
  EXPECT_EQ(back.text, "text");
}

/// Whether a damaged value is read as some value. Otherwise it must be refused by an error.
template <class Read>
bool is_read(Read read) {
  try {
    read();
    return true;
  } catch (const ValueError&) {
  } catch (const cereal::Exception&) {
  }
  return false;
}

TEST(RpcValueFuzz, DamagedValuesThrow) {
  Fuzz fuzz(4);
  const Nested nested{{{"a", {torch::ones({2})}}, {"b", {}}}, {1, 2, 3}, "text"};
  Value good;
  ValueDelivery delivery;
  pack(good, delivery, nested);
  int refused = 0;
  fuzz_for_a_while(5000, [&] {
    const Value damaged{fuzz.damaged(good.bytes), good.tensors};
    refused += is_read([&] { unpack<Nested>(damaged, delivery); }) ? 0 : 1;
  });
  EXPECT_GT(refused, 0);
}

// Numbers and objects with their types in front, as functions take them.
TEST(RpcValueFuzz, DamagedArgumentsThrow) {
  Fuzz fuzz(7);
  using Arguments = std::tuple<std::int64_t, double, std::string, std::vector<at::Tensor>, bool>;
  Value good;
  ValueDelivery delivery;
  detail::put_arguments(good, delivery, std::int64_t{5}, 2.5, std::string("text"),
                        std::vector<at::Tensor>{torch::ones({2})}, true);
  const auto read = [&](const Value& value) {
    return is_read([&] {
      detail::get_arguments<Arguments>("function", value, delivery, std::make_index_sequence<5>());
    });
  };
  EXPECT_TRUE(read(good));
  int refused = 0;
  fuzz_for_a_while(5000, [&] {
    const Value damaged{fuzz.one_in(5) ? fuzz.cut(good.bytes) : fuzz.damaged(good.bytes),
                        good.tensors};
    refused += read(damaged) ? 0 : 1;
  });
  EXPECT_GT(refused, 0);
}

// spec: N3 what a tensor says of itself is checked before memory is taken for it
TEST(RpcValueFuzz, DamagedTensorHeadsAreRefusedOrHarmless) {
  Fuzz fuzz(5);
  int accepted = 0;
  fuzz_for_a_while(5000, [&] {
    std::vector<std::int64_t> sizes;
    for (std::size_t d = fuzz.below(4); d > 0; --d)
      sizes.push_back(static_cast<std::int64_t>(fuzz.below(fuzz.one_in(4) ? 200 : 5)));
    const auto good = torch::empty(sizes);
    TensorHead head;
    head.dtype = static_cast<std::uint8_t>(at::kFloat);
    head.sizes = good.sizes().vec();
    head.strides = good.strides().vec();
    head.bytes = good.nbytes();
    for (std::size_t times = fuzz.below(3); times > 0; --times) {
      const auto any = static_cast<std::int64_t>(fuzz.one_in(2) ? fuzz.word() >> 1 : fuzz.below(8));
      switch (fuzz.below(5)) {
        case 0: head.dtype = static_cast<std::uint8_t>(fuzz.word()); break;
        case 1:
          if (!head.sizes.empty()) head.sizes[fuzz.below(head.sizes.size())] = any;
          break;
        case 2:
          if (!head.strides.empty()) head.strides[fuzz.below(head.strides.size())] = any;
          break;
        case 3: head.bytes = static_cast<std::uint64_t>(any); break;
        default: head.flags ^= TensorHead::kElementOrder; break;
      }
    }
    if (head.bytes > (1U << 24))
      return;  // memory that nobody writes to costs nothing, but there may be little address space
    auto memory = allocate_tensor(head);
    if (!memory.ok()) return;
    ++accepted;
    EXPECT_EQ(memory->data.size(), head.bytes);
    std::fill(memory->data.begin(), memory->data.end(), std::byte{0});
    if ((head.flags & TensorHead::kElementOrder) != 0 && head.bytes > 4096) return;
    const auto tensor = assemble_tensor(head, std::move(*memory));
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef(head.sizes));
  });
  EXPECT_GT(accepted, 0);
}

TEST(RpcIntroductionFuzz, DamagedOnesAreRefusedOrHarmless) {
  Fuzz fuzz(8);
  RpcBackendOptions options;
  options.set_device_map("worker1", {{0, 1}, {"cuda:1", "cpu"}});
  options.set_device_map("worker2", {{"cpu", "cuda:0"}});
  const auto good = introduce("worker0", options);
  const auto back = read_introduction(good, 0);
  EXPECT_EQ(back.name, "worker0");
  ASSERT_EQ(back.device_maps.size(), 2U);
  EXPECT_EQ(back.device_maps.at("worker1").at(0).device().str(), "cuda:1");
  int refused = 0;
  fuzz_for_a_while(2000, [&] {
    try {
      const auto damaged =
          read_introduction(fuzz.one_in(5) ? fuzz.cut(good) : fuzz.damaged(good), 3);
      EXPECT_LE(damaged.name.size(), good.size() + 256);
    } catch (const DistError&) {
      ++refused;
    }
  });
  EXPECT_GT(refused, 0);
}

// ---- a whole worker, and a peer of its job that has lost its mind

/// Messages of every kind, each good but for the damage that is done to it later.
class Mind {
 public:
  Mind(Fuzz& fuzz, std::int64_t context) : fuzz_(fuzz), context_(context) {}

  void fill(MessageKind kind, Value& value, ValueDelivery& delivery) {
    for (std::size_t tensors = fuzz_.below(4); tensors > 0; --tensors) {
      const auto tensor = torch::ones({static_cast<std::int64_t>(fuzz_.below(5))},
                                      fuzz_.one_in(4) ? at::kLong : at::kFloat);
      value.tensors.push_back(
          fuzz_.one_in(3) && tensor.is_floating_point() ? tensor.set_requires_grad(true) : tensor);
    }
    ValueOutput archive(value, delivery);
    if (kind == MessageKind::call || kind == kRRefCreate) {
      detail::put_arguments(value, delivery, std::vector<at::Tensor>(2, torch::ones({2})),
                            std::string("text"));
      if (kind == kRRefCreate) value.bytes += encode(rref_message(RRefMessageKind::create));
    } else if (kind == kRRefProtocol) {
      value.bytes =
          encode(rref_message(static_cast<RRefMessageKind>(fuzz_.below(kRRefMessageKinds))));
    } else if (kind == kRRefFetch || kind == kRRefBackward) {
      encode_rref(archive, rref_message(RRefMessageKind::create).rref);
      if (kind == kRRefBackward) {
        archive(context_);
        archive(fuzz_.one_in(2));
      }
    } else if (kind == kAutogradRelease) {
      archive(context_ + 1 + static_cast<std::int64_t>(fuzz_.below(3)));
    } else {
      put_head(archive,
               {.context = context_,
                .pass = static_cast<std::int64_t>(fuzz_.below(5)),
                .mode = fuzz_.one_in(2) ? dist_autograd::Mode::fast : dist_autograd::Mode::smart,
                .retain_graph = true});
      archive(std::int64_t(1 + fuzz_.below(4)));  // about as many messages have gone the other way
      if (kind == kAutogradGradients)
        archive(std::vector<at::Tensor>(1 + fuzz_.below(2), torch::ones({2})));
    }
    if (!fuzz_.one_in(8)) value.bytes = fuzz_.damaged(value.bytes);
    // It would end its own context, which every worker of it may.
    if (kind == kAutogradRelease &&
        value.bytes == std::string_view(reinterpret_cast<const char*>(&context_), sizeof context_))
      value.bytes.clear();
  }

 private:
  RRefMessage rref_message(RRefMessageKind kind) {
    RRefMessage message;
    message.from = 1;
    message.to = 0;
    message.number = fuzz_.one_in(3) ? fuzz_.below(40) : ++number_;
    message.kind = kind;
    const bool answers = kind == RRefMessageKind::confirm || kind == RRefMessageKind::gone ||
                         kind == RRefMessageKind::accept;
    message.rref = {fuzz_.one_in(3) ? 0 : 1, answers ? 1 : 0, 1 + fuzz_.below(20)};
    message.fork = {static_cast<std::int32_t>(fuzz_.below(2)), answers ? 0 : 1,
                    1 + fuzz_.below(20)};
    message.withdrawn = fuzz_.one_in(2) ? RRefMessageKind::create : RRefMessageKind::fork;
    message.withdrawn_number = 1 + fuzz_.below(40);
    return message;
  }

  Fuzz& fuzz_;
  const std::int64_t context_;
  std::uint64_t number_ = 0;
};

// spec: N2 the callee's exception comes back with its text: messages of every kind, damaged, are
// answered with errors and harm nobody
TEST(RpcWorkerFuzz, DamagedMessagesOfEveryKindHarmNobody) {
  register_function("fuzz_test::count",
                    [](const std::vector<at::Tensor>& tensors, const std::string& text) {
                      return static_cast<int>(tensors.size() + text.size());
                    });
  register_function("fuzz_test::double", [](const at::Tensor& tensor) { return tensor * 2; });
  const std::vector<MessageKind> kinds{MessageKind::call,  kRRefCreate,   kRRefProtocol,
                                       kRRefFetch,         kRRefBackward, MessageKind::user_first,
                                       kAutogradGradients, kAutogradWalk, kAutogradFinish,
                                       kAutogradRelease};
  std::atomic<int> errors{0};
  std::binary_semaphore over(0);
  testing::Workers workers(2);
  workers.run(
      [&](int rank) {
        if (rank == 0) return over.acquire();
        const std::shared_ptr<void> end(nullptr, [&](void*) { over.release(); });
        const auto agent = current_agent("test");
        Fuzz fuzz(9);
        auto context = std::make_unique<dist_autograd::context>();
        std::vector<at::Tensor> sent;  // the other worker has a backward function for each
        for (int i = 0; i < 3; ++i)
          sent.push_back(rpc_sync<at::Tensor>(0, "fuzz_test::double",
                                              torch::ones({2}).set_requires_grad(true)));
        Mind mind(fuzz, context->context_id());
        fuzz_for_a_while(60, [&] {
          std::vector<std::uint64_t> calls;
          for (int i = 0; i < 30; ++i) {
            Agent::OutgoingCall call;
            call.kind = kinds[fuzz.below(kinds.size())];
            call.to = 0;
            call.name = call.kind != MessageKind::call && call.kind != kRRefCreate ? ""
                        : fuzz.one_in(6)                                           ? fuzz.noise(10)
                                         : "fuzz_test::count";
            call.observed = fuzz.one_in(2);
            call.fill = [&, kind = call.kind](Value& value, ValueDelivery& delivery) {
              mind.fill(kind, value, delivery);
            };
            calls.push_back(agent->call(
                std::move(call), [&](const Answer& answer) { errors += answer.error ? 1 : 0; }));
          }
          EXPECT_EQ(rpc_sync<int>(0, "fuzz_test::count",
                                  std::vector<at::Tensor>(3, torch::ones({2})), "four"),
                    7);
          // Some wait for good, since they ask for a value that a call still has to make.
          for (const auto call : calls)
            agent->cancel(call, std::make_exception_ptr(DistError("enough")));
        });
        EXPECT_TRUE(agent->lost(0).ok());
        context.reset();
        shutdown(false);
      },
      false);
  EXPECT_GT(errors.load(), 0);
}

// spec: O1 an unknown id throws; notes of calls that make no sense are refused
TEST(RpcAutogradFuzz, DamagedNotesAreRefusedOrHarmless) {
  testing::Workers workers(1);
  workers.run(
      [](int) {
        const auto autograd = DistAutograd::of(*current_agent("test"));
        const dist_autograd::context context;
        ByteWriter out;
        const std::string good = out.put(context.context_id()).put(std::int64_t{7}).take();
        Fuzz fuzz(10);
        int refused = 0;
        fuzz_for_a_while(1000, [&] {
          RpcMessage message;
          message.note = fuzz.one_in(4)   ? fuzz.noise(40)
                         : fuzz.one_in(4) ? good
                                          : fuzz.damaged(good);
          message.value.tensors = {torch::ones({2}).set_requires_grad(true), torch::ones({2})};
          try {
            autograd->request_arrives(0, message);
            EXPECT_FALSE(message.value.tensors[1].requires_grad());
          } catch (const DistError&) {
            ++refused;
          }
        });
        EXPECT_GT(refused, 0);
      },
      false);
}

}  // namespace
}  // namespace muster::rpc
