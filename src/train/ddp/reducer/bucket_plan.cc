// SPDX-License-Identifier: BSD-3-Clause
#include "train/ddp/reducer/bucket_plan.h"

#include <algorithm>
#include <utility>

namespace muster::parallel {
namespace {

struct Open {
  at::ScalarType dtype;
  c10::Device device;
  BucketIndices indices = {};
  std::int64_t bytes = 0;
  bool first = true;  // no bucket of this kind has been filled yet
};

}  // namespace

std::vector<BucketIndices> plan_buckets(std::span<const ParameterFacts> parameters,
                                        std::span<const std::size_t> order,
                                        std::int64_t first_bytes, std::int64_t cap_bytes) {
  std::vector<BucketIndices> full;
  std::vector<Open> open;
  for (const std::size_t index : order) {
    const ParameterFacts& facts = parameters[index];
    if (facts.alone) {
      full.push_back({index});
      continue;
    }
    auto kind = std::find_if(open.begin(), open.end(), [&](const Open& o) {
      return o.dtype == facts.dtype && o.device == facts.device;
    });
    if (kind == open.end())
      kind = open.insert(open.end(), Open{.dtype = facts.dtype, .device = facts.device});
    kind->indices.push_back(index);
    kind->bytes += facts.bytes;
    if (kind->bytes < (kind->first ? first_bytes : cap_bytes)) continue;
    full.push_back(std::exchange(kind->indices, {}));
    kind->bytes = 0;
    kind->first = false;
  }
  std::erase_if(open, [](const Open& o) { return o.indices.empty(); });
  const auto place = [&](const Open& o) {
    return std::find(order.begin(), order.end(), o.indices.front());
  };
  std::stable_sort(open.begin(), open.end(),
                   [&](const Open& a, const Open& b) { return place(a) < place(b); });
  for (Open& rest : open) full.push_back(std::move(rest.indices));
  return full;
}

}  // namespace muster::parallel
