// SPDX-License-Identifier: BSD-3-Clause
/// The parts of the extension module `muster._C`: one file for each layer of the Python face.
///
/// Names, order and defaults of arguments are torch.distributed's. Durations are
/// datetime.timedelta. Functions that may block go through `blocking` (blocking.h), which releases
/// the GIL. An exception of muster becomes the Python class of the same name.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

#include "muster/collectives.h"
#include "muster/process_group.h"

/// Most calls pass None as the group. pybind11 checks for None last, after an AttributeError that
/// costs more than the rest of the call.
template <>
class pybind11::detail::type_caster<muster::Group>
    : public copyable_holder_caster<muster::ProcessGroup, muster::Group> {
 public:
  bool load(handle source, bool convert) {
    return source.is_none() ||
           copyable_holder_caster<muster::ProcessGroup, muster::Group>::load(source, convert);
  }
};

namespace muster {
struct InitProcessGroupOptions;
}

namespace muster::python {

void bind_errors(pybind11::module_& module);
void bind_stores(pybind11::module_& module);
void bind_reduce_op(pybind11::module_& module);
void bind_work(pybind11::module_& module);
void bind_groups(pybind11::module_& module);
void bind_point_to_point(pybind11::module_& module);
void bind_collectives(pybind11::module_& module);
void bind_objects(pybind11::module_& module);
void bind_debug(pybind11::module_& module);
void bind_spawn(pybind11::module_& module);
void bind_mesh(pybind11::module_& module);
void bind_parallel(pybind11::module_& module);
void bind_sharded(pybind11::module_& module);
void bind_local_sgd(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);
void bind_elastic(pybind11::module_& module);
void bind_functional(pybind11::module_& module);
void bind_registry(pybind11::module_& module);
void bind_torch_backend(pybind11::module_& module);
void bind_torch_rendezvous(pybind11::module_& module);

/// The value of `group_desc` for a group without a description. Requires the GIL.
void describe_group(const Group& group, const std::string& description);

/// The code that an exception's `code` names; Code::internal if it names none.
Code code_of(const std::string& word);

/// The compression that Python's argument `compression` names. Unknown names become a value that
/// the call refuses on all ranks.
Compression compression_of(const std::optional<std::string>& name);

/// For exception handlers whose caller is not Python but whose exception Python will see: converts
/// muster's exceptions to Python's and rethrows others.
void throw_in_python();

/// If torchrun has started this process and the job is to meet by its environment, makes it meet
/// over the store of torchrun's agent, which is stock torch's. Blocks as stock torch does.
void meet_by_torchrun(InitProcessGroupOptions& options);

}  // namespace muster::python
