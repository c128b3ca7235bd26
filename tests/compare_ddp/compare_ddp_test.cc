// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/group/testing/ranks.h"
#include "models.h"
#include "muster/parallel.h"
#include "testing/scratch_folder.h"

namespace muster::testing {
namespace {

namespace fs = std::filesystem;

constexpr int kSteps = 20;

/// Inside a Join the ranks run out one after the other, rank 0 first.
int steps_of(const Case& what, int rank, int ranks) {
  return what.join ? kSteps - 4 * (ranks - 1 - rank) : kSteps;
}

void write_numbers(const fs::path& path, const at::Tensor& tensor) {
  const auto numbers = tensor.detach().to(at::kDouble).contiguous();
  std::ofstream(path, std::ios::binary)
      .write(static_cast<const char*>(numbers.const_data_ptr()),
             static_cast<std::streamsize>(numbers.nbytes()));
}

at::Tensor read_numbers(const fs::path& path, at::ScalarType dtype) {
  std::vector<char> bytes(fs::exists(path) ? fs::file_size(path) : 0);
  std::ifstream(path, std::ios::binary)
      .read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return torch::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size() / sizeof(double))},
                          at::kDouble)
      .clone()
      .to(dtype);
}

std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& model) {
  std::vector<at::Tensor> found;
  std::set<const void*> seen;
  for (const auto& parameter : model.parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) found.push_back(parameter);
  return found;
}

/// Parameters, then buffers, one after the other.
at::Tensor state_of(const torch::nn::Module& model, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (const auto& parameter : distinct_parameters(model))
    parts.push_back(parameter.detach().reshape({-1}).to(dtype));
  for (const auto& buffer : model.buffers()) parts.push_back(buffer.reshape({-1}).to(dtype));
  return torch::cat(parts);
}

struct Data {
  at::Tensor weights;  // of all distinct parameters
  at::Tensor x, y;     // one batch for each step and rank
};

at::Tensor made_up(at::IntArrayRef shape, int tokens, double salt) {
  const auto numbers = torch::arange(c10::multiply_integers(shape), at::kDouble);
  if (tokens > 0)
    return ((numbers * (7 + salt)).remainder(101)).remainder(tokens).floor().view(shape);
  return (torch::sin(numbers * 12.9898 + salt) * 0.8).to(at::kFloat).to(at::kDouble).view(shape);
}

Data data_of(const Case& what, int ranks) {
  const auto shape = [&](const std::vector<std::int64_t>& batch) {
    std::vector<std::int64_t> all{kSteps, ranks};
    all.insert(all.end(), batch.begin(), batch.end());
    return all;
  };
  std::int64_t weights = 0;
  for (const auto& parameter : distinct_parameters(*make_model(what.name, at::kFloat)))
    weights += parameter.numel();
  return {made_up({weights}, 0, 0.5) * 0.6, made_up(shape(what.x_shape), what.tokens, 1),
          made_up(shape(what.y_shape), what.y_is_tokens ? what.tokens : 0, 2)};
}

at::Tensor trained(const Case& what, const Data& data, int rank, int ranks, at::ScalarType dtype) {
  const auto net = make_model(what.name, dtype);
  {
    const torch::NoGradGuard no_grad;
    std::int64_t at = 0;
    for (auto& parameter : distinct_parameters(*net)) {
      parameter.copy_(data.weights.slice(0, at, at + parameter.numel()).view(parameter.sizes()));
      at += parameter.numel();
    }
  }
  DistributedDataParallel<std::shared_ptr<Model>> model(
      net, {.bucket_cap_mb = what.bucket_cap_mb, .find_unused_parameters = what.find_unused});
  torch::optim::SGD optimizer(distinct_parameters(*net),
                              torch::optim::SGDOptions(0.1).momentum(what.momentum));
  const auto x = what.tokens > 0 ? data.x.to(at::kLong) : data.x.to(dtype);
  const auto y = what.y_is_tokens ? data.y.to(at::kLong) : data.y.to(dtype);
  auto join =
      model.join({.enable = what.join, .divide_by_initial_world_size = what.divide_by_initial});
  join.run([&] {
    for (int step = 0; step < steps_of(what, rank, ranks); ++step) {
      optimizer.zero_grad();
      const auto output = model(Batch{x[step][rank], y[step][rank], (step + rank) % 3 == 1});
      loss_of(what, output, y[step][rank]).backward();
      optimizer.step();
    }
  });
  return state_of(*net, dtype);
}

struct Job {
  int ranks;
  at::ScalarType dtype;
};
constexpr Job kJobs[]{{2, at::kFloat}, {3, at::kDouble}, {4, at::kDouble}};

fs::path folder_of(const ScratchFolder& folder, const Job& job) {
  return folder.file(std::to_string(job.ranks));
}

std::map<std::string, Data> hand_over(const fs::path& folder, int ranks) {
  fs::create_directory(folder);
  std::map<std::string, Data> data;
  for (const auto& what : cases()) {
    const auto& given = data[what.name] = data_of(what, ranks);
    write_numbers(folder / (what.name + ".weights"), given.weights);
    write_numbers(folder / (what.name + ".x"), given.x);
    write_numbers(folder / (what.name + ".y"), given.y);
  }
  return data;
}

void compare(const Case& what, const Job& job, int rank, const at::Tensor& ours,
             const at::Tensor& torchs) {
  const auto where =
      what.name + " on rank " + std::to_string(rank) + " of " + std::to_string(job.ranks);
  ASSERT_EQ(ours.sizes(), torchs.sizes()) << where;
  EXPECT_TRUE(ours.isfinite().all().item<bool>()) << where;
  if (job.dtype == at::kFloat) {
    EXPECT_TRUE(torch::equal(ours, torchs))
        << where << ": " << (ours - torchs).abs().max().item<float>() << " apart";
  } else {
    EXPECT_LT(((ours - torchs).norm() / torchs.norm()).item<double>(), 1e-12) << where;
  }
}

// spec: K2 gradients are averaged as torch's are
// spec: K3 unused parameters as torch's
// spec: K7 uneven inputs train to torch's result
// spec: F22 sparse gradients as with Gloo
TEST(CompareWithTorch, TwentyStepsEndInTheSameWeights) {
  const ScratchFolder folder;
  std::map<int, std::map<std::string, Data>> data;
  std::string command = std::string(COMPARE_PYTHON) + " " + COMPARE_WORKER + " " + folder.file("");
  for (const Job& job : kJobs) {
    data[job.ranks] = hand_over(folder_of(folder, job), job.ranks);
    command.append(" ")
        .append(std::to_string(job.ranks))
        .append(job.dtype == at::kFloat ? ":float32" : ":float64");
  }
  ASSERT_EQ(::system(command.c_str()), 0) << command;

  for (const Job& job : kJobs) {
    for (const auto& what : cases()) {
      on_ranks(job.ranks, [&](int rank) {
        at::set_num_threads(1);
        const auto ours =
            trained(what, data.at(job.ranks).at(what.name), rank, job.ranks, job.dtype);
        compare(
            what, job, rank, ours,
            read_numbers(folder_of(folder, job) / (what.name + "." + std::to_string(rank) + ".out"),
                         job.dtype));
      });
    }
  }
}

}  // namespace
}  // namespace muster::testing
