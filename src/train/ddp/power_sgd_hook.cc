// SPDX-License-Identifier: BSD-3-Clause
#include "muster/comm_hook.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "muster/collectives.h"

namespace muster {
namespace {

/// Takes the next elements of `flat`, in the given shape.
at::Tensor next_piece(const at::Tensor& flat, std::int64_t& at, at::IntArrayRef shape) {
  const auto count = c10::multiply_integers(shape);
  return flat.narrow(0, std::exchange(at, at + count), count).view(shape);
}

at::Tensor flattened(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back(tensor.reshape({-1}));
  return at::cat(parts);
}

}  // namespace

/// One bucket between start and end of its communication.
struct PowerSGDState::CompressionPass {
  GradBucket bucket;
  Group group;
  bool batched = false;
  std::vector<at::Tensor> whole;  // sent uncompressed
  at::Tensor whole_flat;
  WorkRef whole_work;
  std::vector<Block> blocks;
  at::Tensor p, q;
  WorkRef p_work;
};

PowerSGDState::PowerSGDState(const PowerSGDOptions& options)
    : options_(options), random_(at::detail::createCPUGenerator(options.random_seed)) {
  if (options.matrix_approximation_rank < 1)
    group::invalid("PowerSGD: matrix_approximation_rank must be at least 1");
  if (!(options.min_compression_rate > 0))
    group::invalid("PowerSGD: min_compression_rate must be more than 0");
  if ((options.use_error_feedback || options.warm_start) && options.start_powerSGD_iter < 2)
    group::invalid(
        "PowerSGD: start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start: "
        "what they remember belongs to buckets, "
        "which "
        "are laid out anew after the first pass");
}

// ---- start of a bucket

PowerSGDState::Finish PowerSGDState::average(const GradBucket& bucket) const {
  at::Tensor sum = bucket.buffer;
  const Group group = parallel::group_of(bucket, options_.process_group);
  sum.div_(group->size());
  auto work = all_reduce(sum, {.group = group, .async_op = true});
  return [sum, work] {
    work->wait();
    return sum;
  };
}

PowerSGDState::Finish PowerSGDState::start(const GradBucket& bucket, bool batched) {
  const at::NoGradGuard no_grad;
  const bool compresses = iteration_ >= options_.start_powerSGD_iter && !just_loaded_;
  count(bucket);
  if (!compresses || bucket.buffer.is_sparse()) return average(bucket);

  Memory& memory = memory_[bucket.index];
  if (options_.use_error_feedback) {
    at::Tensor sums = bucket.buffer;
    if (memory.error.defined() && memory.error.numel() == sums.numel()) {
      sums.add_(memory.error);
    } else {
      memory.error = at::empty_like(sums);
    }
    memory.error.copy_(sums);
  }

  auto pass = std::make_shared<CompressionPass>();
  pass->bucket = bucket;
  const Group& group = pass->group = parallel::group_of(bucket, options_.process_group);
  pass->batched = batched;
  pass->blocks = plan(bucket, batched, pass->whole);
  stats_.before += bucket.buffer.numel();
  if (!pass->whole.empty()) {
    pass->whole_flat = flattened(pass->whole).div_(group->size());
    pass->whole_work = all_reduce(pass->whole_flat, {.group = group, .async_op = true});
    stats_.after += pass->whole_flat.numel();
  }
  if (!pass->blocks.empty()) {
    pass->q = factors(pass->blocks, memory, bucket.buffer.options());
    std::vector<at::Tensor> products;
    for (const Block& block : pass->blocks) products.push_back(at::bmm(block.matrices, block.q));
    pass->p = flattened(products);
    pass->p_work = all_reduce(pass->p, {.group = group, .async_op = true});
    std::int64_t at = 0;
    for (std::size_t i = 0; i < products.size(); ++i)
      pass->blocks[i].p = next_piece(pass->p, at, products[i].sizes());
    stats_.after += pass->p.numel() + pass->q.numel();
  }
  return [this, pass] { return finish(*pass); };
}

bool PowerSGDState::pays(std::int64_t rows, std::int64_t columns) const {
  const auto rank = std::min<std::int64_t>({rows, columns, options_.matrix_approximation_rank});
  return static_cast<double>((rows + columns) * rank) * options_.min_compression_rate <
         static_cast<double>(rows * columns);
}

std::vector<PowerSGDState::Block> PowerSGDState::blocks_of(
    const std::vector<at::Tensor>& matrices) const {
  std::vector<Block> blocks;
  for (const at::Tensor& place : matrices) {
    const auto same_shape = [&](const Block& block) {
      return block.places.front().sizes() == place.sizes();
    };
    const auto found = options_.batch_tensors_with_same_shape
                           ? std::find_if(blocks.begin(), blocks.end(), same_shape)
                           : blocks.end();
    if (found != blocks.end()) {
      found->places.push_back(place);
    } else {
      blocks.push_back({.places = {place}, .matrices = {}, .p = {}, .q = {}});
    }
  }
  for (Block& block : blocks) {
    std::vector<at::Tensor> as_matrices;
    for (const at::Tensor& place : block.places)
      as_matrices.push_back(place.reshape({place.size(0), -1}));
    block.matrices =
        as_matrices.size() == 1 ? as_matrices.front().unsqueeze(0) : at::stack(as_matrices);
  }
  return blocks;
}

/// The compressed gradients; the bucket's other gradients go to `whole`.
std::vector<PowerSGDState::Block> PowerSGDState::plan(const GradBucket& bucket, bool batched,
                                                      std::vector<at::Tensor>& whole) {
  if (batched) {
    const auto side =
        static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(bucket.buffer.numel()))));
    auto square = at::zeros({side, side}, bucket.buffer.options());
    square.view({-1}).narrow(0, 0, bucket.buffer.numel()).copy_(bucket.buffer);
    return blocks_of({square});
  }
  std::vector<at::Tensor> compressed;
  for (const at::Tensor& gradient : bucket.gradients) {
    const bool is_matrix = gradient.dim() >= 2 && gradient.numel() > 0;
    (is_matrix && pays(gradient.size(0), gradient.numel() / gradient.size(0)) ? compressed : whole)
        .push_back(gradient);
  }
  return blocks_of(compressed);
}

/// Sets the matrix each block is multiplied by: the previous factors or random ones, equal on every
/// rank; orthonormal.
at::Tensor PowerSGDState::factors(std::vector<Block>& blocks, Memory& memory,
                                  const at::TensorOptions& options) {
  std::vector<std::vector<std::int64_t>> shapes;
  std::int64_t elements = 0;
  for (const Block& block : blocks) {
    const auto rows = block.matrices.size(1), columns = block.matrices.size(2);
    shapes.push_back({block.matrices.size(0), columns,
                      std::min<std::int64_t>({rows, columns, options_.matrix_approximation_rank})});
    elements += c10::multiply_integers(shapes.back());
  }
  const bool warm = options_.warm_start && memory.q.defined() && memory.q.numel() == elements;
  at::Tensor q =
      warm ? memory.q : at::randn({elements}, random_, at::TensorOptions(at::kFloat)).to(options);
  if (options_.warm_start) memory.q = q;
  std::int64_t at = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    blocks[i].q = next_piece(q, at, shapes[i]);
    orthogonalize(blocks[i].q);
  }
  return q;
}

/// Orthonormalises columns in place. Several columns use QR, which also handles dependent columns;
/// a zero column stays zero.
void PowerSGDState::orthogonalize(at::Tensor matrices) const {
  if (matrices.size(2) == 1) {
    const auto length = at::linalg_vector_norm(matrices, 2, at::IntArrayRef{1}, true) +
                        options_.orthogonalization_epsilon;
    matrices.div_(at::where(length == 0, at::ones_like(length), length));
    return;
  }
  const bool narrow =
      matrices.scalar_type() == at::kHalf || matrices.scalar_type() == at::kBFloat16;
  matrices.copy_(std::get<0>(at::linalg_qr(narrow ? matrices.to(at::kFloat) : matrices)));
}

// ---- its end

at::Tensor PowerSGDState::finish(CompressionPass& pass) {
  const at::NoGradGuard no_grad;
  if (pass.whole_work) {
    pass.whole_work->wait();
    std::int64_t at = 0;
    for (at::Tensor& gradient : pass.whole)
      gradient.copy_(next_piece(pass.whole_flat, at, gradient.sizes()));
  }
  if (!pass.blocks.empty()) {
    pass.p_work->wait();
    for (Block& block : pass.blocks) {
      orthogonalize(block.p);
      block.q.copy_(at::bmm(block.matrices.transpose(1, 2), block.p));
    }
    all_reduce(pass.q, {.group = pass.group});
    pass.q.div_(pass.group->size());
    for (Block& block : pass.blocks) {
      const auto matrices = at::bmm(block.p, block.q.transpose(1, 2));
      for (std::size_t i = 0; i < block.places.size(); ++i)
        block.places[i].copy_(matrices[static_cast<std::int64_t>(i)].view(block.places[i].sizes()));
    }
  }
  at::Tensor buffer = pass.bucket.buffer;
  if (pass.batched)
    buffer.copy_(pass.blocks.front().places.front().view({-1}).narrow(0, 0, buffer.numel()));
  if (options_.use_error_feedback) memory_[pass.bucket.index].error.sub_(buffer);
  return buffer;
}

void PowerSGDState::count(const GradBucket& bucket) {
  if (!bucket.is_last) return;
  ++iteration_;
  just_loaded_ = false;
  if (stats_.before == 0 || iteration_ < next_report_) return;
  next_report_ =
      iteration_ + std::max<std::int64_t>(1, options_.compression_stats_logging_frequency);
  if (logs(LogLevel::info))
    log(LogLevel::info,
        "PowerSGD: after " + std::to_string(iteration_) + " passes, " +
            std::to_string(stats_.before) + " elements of gradients have travelled as " +
            std::to_string(stats_.after) + ", rate " + std::to_string(stats_.rate()));
}

// ---- checkpoints

void PowerSGDState::save(torch::serialize::OutputArchive& archive) const {
  archive.write("iteration", torch::tensor(iteration_, at::kLong));
  archive.write("random", random_.get_state());
  std::vector<std::int64_t> buckets;
  for (const auto& [bucket, memory] : memory_) {
    buckets.push_back(static_cast<std::int64_t>(bucket));
    if (memory.error.defined()) archive.write("error " + std::to_string(bucket), memory.error);
    if (memory.q.defined()) archive.write("q " + std::to_string(bucket), memory.q);
  }
  archive.write("buckets", torch::tensor(buckets, at::kLong));
}

void PowerSGDState::load(torch::serialize::InputArchive& archive) {
  at::Tensor iteration, random, buckets;
  archive.read("iteration", iteration);
  archive.read("random", random);
  archive.read("buckets", buckets);
  iteration_ = iteration.item<std::int64_t>();
  random_.set_state(random);
  just_loaded_ = true;
  memory_.clear();
  for (std::int64_t i = 0; i < buckets.numel(); ++i) {
    const auto bucket = static_cast<std::size_t>(buckets[i].item<std::int64_t>());
    Memory& memory = memory_[bucket];
    archive.try_read("error " + std::to_string(bucket), memory.error);
    archive.try_read("q " + std::to_string(bucket), memory.q);
  }
}

CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state) {
  return [state = std::move(state)](const GradBucket& bucket) -> PowerSGDState::Finish {
    return [state, finish = state->start(bucket, false)] { return finish(); };
  };
}

CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state) {
  return [state = std::move(state)](const GradBucket& bucket) -> PowerSGDState::Finish {
    return [state, finish = state->start(bucket, true)] { return finish(); };
  };
}

}  // namespace muster
