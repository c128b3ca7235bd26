// SPDX-License-Identifier: BSD-3-Clause
#include "muster/point_to_point.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "blocking.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using Rank = std::optional<int>;

}  // namespace

void bind_point_to_point(py::module_& module) {
  module.def(
      "send",
      [](const at::Tensor& tensor, Rank dst, const Group& group, std::int64_t tag, Rank group_dst) {
        blocking(group, [&] {
          send(tensor, {.dst = dst, .group = group, .tag = tag, .group_dst = group_dst});
        });
      },
      py::arg("tensor"), py::arg("dst") = py::none(), py::arg("group") = py::none(),
      py::arg("tag") = 0, py::arg("group_dst") = py::none(),
      "Blocks until the tensor may be changed. dst: a rank of the default group; group_dst: of "
      "`group`. Messages with"
      " one tag between two ranks keep their order. Raises DistBackendError, with the ranks at "
      "fault, where the peer fails or does not "
      "take it "
      "within the group's timeout, ValueError (DistArgumentError) for ranks that there are not, "
      "this one itself, or both dst and "
      "group_dst.");
  module.def(
      "isend",
      [](const at::Tensor& tensor, Rank dst, const Group& group, std::int64_t tag, Rank group_dst) {
        return blocking(group, [&] {
          return isend(tensor, {.dst = dst, .group = group, .tag = tag, .group_dst = group_dst});
        });
      },
      py::arg("tensor"), py::arg("dst") = py::none(), py::arg("group") = py::none(),
      py::arg("tag") = 0, py::arg("group_dst") = py::none(),
      "Starts a send: a Work, None for a non-member. The tensor must stay as it is until the Work "
      "is completed. Raises as `send`, for what "
      "fails later in the Work's wait.");
  module.def(
      "recv",
      [](const at::Tensor& tensor, Rank src, const Group& group, std::int64_t tag, Rank group_src) {
        return blocking(group, [&] {
          return recv(tensor, {.src = src, .group = group, .tag = tag, .group_src = group_src});
        });
      },
      py::arg("tensor"), py::arg("src") = py::none(), py::arg("group") = py::none(),
      py::arg("tag") = 0, py::arg("group_src") = py::none(),
      "Blocks until a message has filled the tensor; returns the sender's rank, -1 for a "
      "non-member. src None: from "
      "any rank. Raises DistBackendError where the message has another size or dtype, and, with "
      "the ranks at fault, where the peer fails "
      "or "
      "sends nothing within the group's timeout; ValueError (DistArgumentError) for ranks that "
      "there are not, this one itself, or both src "
      "and group_src.");
  module.def(
      "irecv",
      [](const at::Tensor& tensor, Rank src, const Group& group, std::int64_t tag, Rank group_src) {
        return blocking(group, [&] {
          return irecv(tensor, {.src = src, .group = group, .tag = tag, .group_src = group_src});
        });
      },
      py::arg("tensor"), py::arg("src") = py::none(), py::arg("group") = py::none(),
      py::arg("tag") = 0, py::arg("group_src") = py::none(),
      "Starts a receive: a Work, None for a non-member. src None: from any rank. Raises as `recv`, "
      "for what fails later in the Work's "
      "wait.");
  using Entry = std::tuple<bool, at::Tensor, Rank, Group, std::int64_t, Rank>;
  module.def("batch_of_messages", [](const std::vector<Entry>& entries) {
    std::vector<P2POp> ops;
    std::vector<Group> groups;
    for (const auto& [sends, tensor, peer, group, tag, group_peer] : entries) {
      ops.push_back(
          sends ? P2POp(static_cast<P2POp::Send>(isend), tensor, peer, group, tag, group_peer)
                : P2POp(static_cast<P2POp::Recv>(irecv), tensor, peer, group, tag, group_peer));
      if (const auto acts = acting(group); acts && acts->is_member()) groups.push_back(acts);
    }
    const auto works = without_gil([groups] { std::ranges::for_each(groups, interrupt); },
                                   [&] { return batch_isend_irecv(ops); });
    std::vector<GroupWork> made;  // one for each entry of a member, in their order
    for (std::size_t i = 0; i < works.size(); ++i) made.push_back({works[i], groups.at(i)});
    return made;
  });
}

}  // namespace muster::python
