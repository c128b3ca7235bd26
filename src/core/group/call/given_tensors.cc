#include "core/group/call/given_tensors.h"

#include "core/group/call/call_checks.h"

namespace muster::group {

Slices GivenTensors::slices(int members) const {
  Slices slices;
  const auto one = [&](const at::Tensor& tensor) {
    slices.emplace_back();
    slices.back().push_back(tensor);
  };
  const at::Tensor* const first = tensors;
  switch (form) {
    case Form::nothing: break;
    case Form::tensor:
    case Form::list:
      slices.reserve(count);
      for (std::size_t i = 0; i < count; ++i) one(first[i]);
      break;
    case Form::parts:
      for (const auto& part : parts_of(*first, *part, members)) one(part);
      break;
    case Form::splits: {
      std::int64_t at = 0;
      for (int member = 0; member < members; ++member) {
        const std::int64_t rows =
            sizes->empty() ? first->size(0) / members : (*sizes)[static_cast<std::size_t>(member)];
        one(first->narrow(0, at, rows));
        at += rows;
      }
      break;
    }
    case Form::coalesced: slices.emplace_back(first, first + count); break;
    case Form::lists:
      for (const auto& list : *lists) slices.emplace_back(list.begin(), list.end());
  }
  return slices;
}

}  // namespace muster::group
