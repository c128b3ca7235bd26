// SPDX-License-Identifier: BSD-3-Clause
#include <utility>

#include "bindings.h"
#include "blocking.h"
#include "muster/objects.h"

// Objects come and go as bytes: muster/objects.py pickles them. Nothing is unpickled that did not
// come from a rank of the job.
namespace muster::python {
namespace {

namespace py = pybind11;
using Rank = std::optional<int>;
using Device = std::optional<at::Device>;

/// A Python function without arguments that returns a list of bytes. Called without the GIL held,
/// on the thread that created it.
group::PackObjects packer(const py::function& pack) {
  return [pack = &pack] {
    const py::gil_scoped_acquire held;
    group::ObjectBytes all;
    for (const auto& each : py::list((*pack)())) all.push_back(each.cast<std::string>());
    return all;
  };
}

py::object as_list(const std::optional<group::ObjectBytes>& all) {
  if (!all) return py::none();
  py::list list;
  for (const auto& each : *all) list.append(py::bytes(each));
  return list;
}

}  // namespace

void bind_objects(py::module_& module) {
  module.def("broadcast_objects", [](const Group& group, Device device, Rank src, Rank group_src,
                                     std::size_t length, const py::function& pack) {
    return as_list(blocking(group, [&] {
      return group::broadcast_objects({.group = group, .device = device}, {src, group_src}, length,
                                      packer(pack));
    }));
  });
  module.def("all_gather_objects",
             [](const Group& group, std::size_t length, const py::function& pack) {
               return as_list(blocking(group, [&] {
                 return group::all_gather_objects({.group = group}, length, packer(pack));
               }));
             });
  module.def("gather_objects", [](const Group& group, Rank dst, Rank group_dst, std::size_t length,
                                  const py::function& pack) {
    return as_list(blocking(group, [&] {
      return group::gather_objects({.group = group}, {dst, group_dst}, length, packer(pack));
    }));
  });
  module.def("scatter_objects",
             [](const Group& group, Rank src, Rank group_src, std::size_t output_length,
                std::size_t input_length, const py::function& pack) -> py::object {
               const auto mine = blocking(group, [&] {
                 return group::scatter_objects({.group = group}, {src, group_src}, output_length,
                                               input_length, packer(pack));
               });
               if (!mine) return py::none();
               return py::bytes(*mine);
             });
  module.def("send_objects", [](const Group& group, Device device, Rank dst, Rank group_dst,
                                const py::function& pack) {
    blocking(group, [&] {
      group::send_objects({.group = group, .device = device}, {dst, group_dst}, packer(pack));
    });
  });
  module.def("recv_objects", [](const Group& group, Device device, Rank src, Rank group_src,
                                std::size_t length) {
    const auto came = blocking(group, [&] {
      return group::recv_objects({.group = group, .device = device}, {src, group_src}, length);
    });
    return py::make_tuple(came.source, as_list(came.objects));
  });
}

}  // namespace muster::python
