// SPDX-License-Identifier: BSD-3-Clause
/// Functions of this folder's test workers, registered once per process, and gates they wait at.
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <cereal/types/map.hpp>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "muster/rpc_calls.h"

namespace muster::rpc::testing {

inline at::Tensor scale(const at::Tensor& tensor, double by) { return tensor * by; }
inline std::string whose(const std::string& prefix) { return prefix + get_worker_info().name(); }
inline at::Tensor echo(at::Tensor tensor) { return tensor; }
inline int fail_with(int kind) {
  switch (kind) {
    case 0: throw std::out_of_range("no such row");
    case 1: throw std::invalid_argument("not like that");
    case 2: throw DistError("not this", Code::mismatch, {7});
    case 3: (void)torch::ones({2}).view({3}); break;
    case 4: throw 42;  // NOLINT
    case 5: {
      struct Own : std::runtime_error {
        using std::runtime_error::runtime_error;
      };
      throw Own("an error of mine");
    }
    default: break;
  }
  return kind;
}

struct Row {
  std::string name;
  std::vector<at::Tensor> parts;
  std::map<int, double> weights;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name, parts, weights);
  }
};

/// Gates that functions wait at until a test opens them. Process-wide, because the workers are
/// threads of one process.
struct Gates {
  std::mutex mutex;
  std::map<int, Promise<int>> gates;
  Promise<int> at(int number) {
    const std::lock_guard lock(mutex);
    return gates.try_emplace(number, std::weak_ptr<Agent>()).first->second;
  }
};
inline Gates gates;
inline std::atomic<int> next_gate{0};
inline std::atomic<int> entered{0};

/// Runs `depth` nested callbacks, each waiting for the next; returns their number.
inline Future<int> callbacks_that_wait(int worker, int depth) {
  const int gate = next_gate++;
  const auto count = rpc_async<int>(worker, "later", gate).then([=](const Future<int>& answer) {
    return answer.wait() + (depth > 1 ? callbacks_that_wait(worker, depth - 1).wait() : 0);
  });
  gates.at(gate).set_value(1);
  return count;
}

struct Registered {
  Registered() {
    register_function("scale", scale);
    register_function("whose", whose);
    register_function("echo", echo);
    register_function("fail_with", fail_with);
    register_function("add_at_once", [](std::int64_t a, std::int64_t b) { return a + b; },
                      {.runs = Runs::at_once});
    register_function("nothing", [] {}, {.runs = Runs::at_once});
    register_function("row_back", [](Row row) {
      std::reverse(row.parts.begin(), row.parts.end());
      row.weights[9] = 0.5;
      return row;
    });
    register_function("wait_at", [](int gate) {
      ++entered;
      return gates.at(gate).future().wait();
    });
    register_function("later", [](int gate) { return gates.at(gate).future(); });
    register_function("sum_of", [](const std::vector<at::Tensor>& tensors) {
      auto sum = torch::zeros({});
      for (const auto& tensor : tensors) sum = sum + tensor.sum();
      return sum;
    });
    // Calls the next worker, which calls the next, and so on: deeply nested calls.
    register_function("chain", [](int hops) -> std::string {
      const auto self = get_worker_info();
      if (hops == 0) return self.name();
      const int next = (self.id() + 1) % static_cast<int>(get_worker_infos().size());
      return self.name() + " " + rpc_sync<std::string>(next, "chain", hops - 1);
    });
    register_function("chain_later", [](int hops) -> Future<std::string> {
      const auto self = get_worker_info();
      if (hops == 0) return made_ready(self.name());
      const int next = (self.id() + 1) % static_cast<int>(get_worker_infos().size());
      return rpc_async<std::string>(next, "chain_later", hops - 1)
          .then(
              [self](const Future<std::string>& rest) { return self.name() + " " + rest.wait(); });
    });
    register_function("echo_text", [](std::string text) { return text; });
    register_function("has_grad_mode", [] { return at::GradMode::is_enabled(); });
  }
};
inline const Registered registered;

}  // namespace muster::rpc::testing
