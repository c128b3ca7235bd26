// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/kernels/kernels.h"

#include "core/collective/kernels/kernels_table.h"

namespace muster::collective {
namespace {

const kernels::Table& table() {
#if defined(__x86_64__)
  static const kernels::Table& chosen =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
          ? kernels::avx512
      : __builtin_cpu_supports("avx2") ? kernels::avx2
                                       : kernels::baseline;
  return chosen;
#else
  return kernels::baseline;
#endif
}

// Complex elements are reduced as pairs of parts.
std::size_t parts(std::size_t count, DType dtype) { return is_complex(dtype) ? 2 * count : count; }

void reduce(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
            DType dtype, Reduce reduce, double divisor) {
  const auto function = table().reduce[static_cast<int>(dtype)][static_cast<int>(reduce)];
  if (function == nullptr || inputs.empty() || count == 0) return;
  function(out, inputs.data(), inputs.size(), parts(count, dtype), divisor);
}

}  // namespace

const char* instruction_set() {
#if defined(__x86_64__)
  if (&table() == &kernels::avx512) return "AVX-512";
  if (&table() == &kernels::avx2) return "AVX2";
#endif
  return "baseline";
}

void reduce_many(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                 DType dtype, Reduce kind) {
  reduce(out, inputs, count, dtype, kind, 0);
}

void reduce_complete(std::byte* out, std::span<const std::byte* const> inputs, std::size_t count,
                     DType dtype, Reduce kind, double divisor) {
  reduce(out, inputs, count, dtype, kind, kind == Reduce::avg ? divisor : 0);
}

void scale(std::byte* out, const std::byte* in, std::size_t count, DType dtype, double factor) {
  table().scale[static_cast<int>(dtype)](out, in, parts(count, dtype), factor);
}

void finish_average(std::byte* data, std::size_t count, DType dtype, int members) {
  table().divide[static_cast<int>(dtype)](data, parts(count, dtype), members);
}

void widen(float* out, const std::byte* in, std::size_t count, DType dtype) {
  (dtype == DType::float16 ? table().widen_half : table().widen_bfloat)(out, in, count);
}

void narrow(std::byte* out, const float* in, std::size_t count, DType dtype) {
  (dtype == DType::float16 ? table().narrow_half : table().narrow_bfloat)(out, in, count);
}

}  // namespace muster::collective
