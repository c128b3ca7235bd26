// SPDX-License-Identifier: BSD-3-Clause
// muster.checkpoint's C++ half: parts of tensors to files and back. Nested dictionaries, modules
// and optimizers are Python's (python/muster/checkpoint).
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "bindings.h"
#include "blocking.h"
#include "checkpoint/format/convert.h"
#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/history.h"
#include "checkpoint/format/load.h"
#include "checkpoint/modules/engine.h"
#include "checkpoint_items.h"
#include "core/group/errors.h"
#include "no_gil.h"
#include "train/fsdp/sharded_unit.h"

namespace muster::python {
namespace {

namespace py = pybind11;
using Released = py::call_guard<py::gil_scoped_release>;
using checkpoint::CheckpointItem;
using checkpoint::Saver;

/// (name, tensor, sizes of the whole, place): the place is None for the whole tensor, a list for
/// the offsets of a box, a number for the first element of a stretch, -1 for a number of
/// Python's.
using GivenItem = std::tuple<std::string, at::Tensor, std::vector<std::int64_t>,
                             std::variant<std::monostate, std::int64_t, std::vector<std::int64_t>>>;

constexpr std::int64_t kNumberOfPython = -1;

Items items_of(const std::vector<GivenItem>& given) {
  Items made;
  std::vector<CheckpointItem>& items = made.all;
  for (const auto& [name, tensor, sizes, place] : given) {
    const auto* first = std::get_if<std::int64_t>(&place);
    const bool is_number = first != nullptr && *first == kNumberOfPython;
    if (first != nullptr && !is_number)
      items.push_back(checkpoint::stretch_item(name, tensor, sizes, *first));
    else if (const auto* offsets = std::get_if<std::vector<std::int64_t>>(&place))
      items.push_back(checkpoint::box_item(name, tensor, sizes, *offsets));
    else
      items.push_back(checkpoint::whole_item(name, tensor));
    items.back().is_number = is_number;
  }
  return made;
}

/// The ranks of one save or load: a group of muster's, None for this process alone, or (rank, size,
/// function, another) where a function takes a text and whether the group's timeout holds, and
/// gives the list of all ranks' texts. The other one is for a saver's thread.
using Foreign = std::tuple<int, int, py::function, py::function>;
using Members = std::variant<std::monostate, Group, Foreign>;

shards::SavingRanks foreign_ranks(int rank, int size, const py::function& function) {
  return {
      rank, size,
      [function = kept(function)](const std::string& mine,
                                  shards::ExchangeLimit limit) -> Result<std::vector<std::string>> {
        const py::gil_scoped_acquire held;
        try {
          std::vector<std::string> all;
          for (const auto& each :
               (*function)(py::bytes(mine), limit == shards::ExchangeLimit::group_timeout))
            all.push_back(each.cast<std::string>());
          return all;
        } catch (py::error_already_set& error) {
          return Status(Code::peer_failed, error.what());
        }
      }};
}

shards::SavingRanks ranks_of(const Members& members) {
  if (const auto* foreign = std::get_if<Foreign>(&members))
    return foreign_ranks(std::get<0>(*foreign), std::get<1>(*foreign), std::get<2>(*foreign));
  const auto* group = std::get_if<Group>(&members);
  return checkpoint::ranks_of(group != nullptr ? *group : nullptr);
}

Group group_of(const Members& members) {
  const auto* group = std::get_if<Group>(&members);
  return group != nullptr ? *group : nullptr;
}

shards::CommitOptions options_of(const std::string& path, std::optional<std::int64_t> step,
                                 bool overwrite, int keep_last) {
  return {.path = path, .step = step, .overwrite = overwrite, .keep_last = keep_last};
}

void bind_index(py::module_& module) {
  py::class_<shards::Index>(module, "_CheckpointIndex")
      .def_static(
          "open",
          [](const std::string& folder, bool safetensors) {
            return group::take(safetensors ? shards::open_safetensors(folder)
                                           : shards::open_index(folder));
          },
          Released())
      .def_readonly("folder", &shards::Index::folder)
      .def_readonly("step", &shards::Index::step)
      .def_property_readonly("number", [](const shards::Index& self) { return self.commit.number; })
      .def_readonly("world_size", &shards::Index::world_size)
      .def_readonly("saved_at", &shards::Index::saved_at)
      .def_readonly("values", &shards::Index::values)
      .def_property_readonly("tensors",
                             [](const shards::Index& self) {
                               std::map<std::string, std::pair<std::string, shards::Extent>> all;
                               for (const auto& [name, tensor] : self.tensors)
                                 all[name] = {tensor.dtype, tensor.sizes};
                               return all;
                             })
      .def_property_readonly(
          "digest",
          [](const shards::Index& self) { return shards::digest_of(shards::text_of_index(self)); })
      .def("verify", &shards::verify, Released())
      .def(
          "export",
          [](const shards::Index& self, const std::string& folder, const std::string& prefix,
             std::int64_t file_bytes) {
            group::check(shards::export_whole(self, folder, {prefix, file_bytes}));
          },
          py::arg("folder"), py::arg("prefix"), py::arg("file_bytes"), Released());
}

void bind_saver(py::module_& module) {
  py::class_<Items>(module, "_CheckpointItems").def(py::init(&items_of));
  py::class_<checkpoint::Saving>(module, "_CheckpointSaving")
      .def("wait", &checkpoint::Saving::wait, Released())
      .def("wait_unheard", &Saver::wait_unreported, Released())
      .def("done", &checkpoint::Saving::done);
  py::class_<Saver, std::shared_ptr<Saver>>(module, "_CheckpointSaver", let_go_without_gil<Saver>())
      .def_static("of",
                  [](const Members& members) {
                    if (const auto* foreign = std::get_if<Foreign>(&members)) {
                      const auto& [rank, size, here, behind] = *foreign;
                      return std::make_shared<Saver>(foreign_ranks(rank, size, here),
                                                     foreign_ranks(rank, size, behind));
                    }
                    const Group group = group_of(members);
                    const py::gil_scoped_release released;
                    return checkpoint::saver_of(group);
                  })
      .def("fail",
           [](Saver& self, const std::string& why) {
             const py::gil_scoped_release released;
             self.fail(DistError(why));
           })
      .def("save",
           [](Saver& self, const Items& items, const std::string& values, const std::string& path,
              std::optional<std::int64_t> step, bool overwrite, int keep_last) {
             blocking(nullptr, [&] {
               self.save(items.all, values, options_of(path, step, overwrite, keep_last));
             });
           })
      .def("async_save", [](Saver& self, const Items& items, const std::string& values,
                            const std::string& path, std::optional<std::int64_t> step,
                            bool overwrite, int keep_last) {
        return blocking(nullptr, [&] {
          return self.async_save(items.all, values, options_of(path, step, overwrite, keep_last));
        });
      });
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_index(module);
  bind_saver(module);
  module.def("_checkpoint_load", [](const shards::Index& index, const Items& items,
                                    const Members& members) {
    const auto ranks = ranks_of(members);
    blocking(group_of(members), [&] { checkpoint::load_items(index, items.all, ranks); });
  });
  module.def("_checkpoint_check", [](const shards::Index& index, const Items& items) {
    blocking(nullptr, [&] { group::check(checkpoint::check_items(index, items.all)); });
  });
  // Every rank states whether it can continue and gives a text, and receives all ranks' texts. If a
  // rank cannot continue, its reason `why` is raised on all ranks.
  module.def("_checkpoint_agree", [](const Members& members, const std::optional<std::string>& why,
                                     const std::string& text) {
    const auto ranks = ranks_of(members);
    const Status mine = why ? Status(Code::invalid_argument, *why) : Status();
    return blocking(group_of(members), [&] {
      return group::take(
          shards::exchange_or_fail(ranks, mine, text, shards::ExchangeLimit::group_timeout));
    });
  });
  module.def(
      "_checkpoint_import",
      [](const std::string& from, const std::string& to) {
        const auto index = group::take(shards::open_safetensors(from));
        group::check(shards::import_safetensors(index, to));
      },
      Released());
  module.def("_checkpoint_local_path",
             [](const std::string& name) { return group::take(shards::local_path(name)); });
  module.def(
      "_checkpoints_in",
      [](const std::string& folder) {
        return shards::checkpoints_in(group::take(shards::local_path(folder)));
      },
      Released());
  module.def(
      "_sharded_part",
      [](const at::Tensor& parameter)
          -> std::optional<std::pair<std::vector<std::int64_t>,
                                     std::variant<std::int64_t, std::vector<std::int64_t>>>> {
        const auto part = parallel::sharded_part(parameter);
        if (!part) return {};
        if (part->offsets) return {{part->sizes, *part->offsets}};
        return {{part->sizes, part->first}};
      });
}

}  // namespace muster::python
