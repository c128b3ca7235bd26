// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/functional.h>

#include <chrono>
#include <optional>
#include <tuple>

#include "bindings.h"
#include "blocking.h"
#include "models.h"
#include "no_gil.h"
#include "train/fsdp/sharded_norm.h"
#include "train/fsdp/sharded_parameters.h"
#include "train/fsdp/sharded_plan.h"
#include "train/fsdp/sharded_unit.h"

// The C++ part of muster/fsdp. As in parallel.cc, nothing takes a unit's lock while holding the
// GIL.
namespace muster::python {
namespace {

namespace py = pybind11;
using at::Tensor;

/// By the names that they have in C++; reshard_after_forward is a bool or a number of ranks.
parallel::ShardedUnitOptions unit_options_of(
    const Group& group, const py::dict& given,
    const std::optional<std::vector<std::int64_t>>& shard_dims) {
  using parallel::Keep;
  parallel::ShardedUnitOptions options{.group = group, .frame = frame(), .shard_dims = shard_dims};
  if (given.contains("mixed_precision") && !given["mixed_precision"].is_none())
    options.mixed_precision = precision_of(given["mixed_precision"]);
  take(given, "replicas", options.replicas);
  take(given, "shards", options.shards);
  take(given, "cast_root_forward_inputs", options.cast_root_forward_inputs);
  take(given, "reduce_in_own_dtype", options.reduce_in_own_dtype);
  take(given, "sync_module_states", options.sync_module_states);
  take(given, "forward_prefetch", options.forward_prefetch);
  take(given, "cpu_offload", options.cpu_offload);
  take(given, "pin_memory", options.pin_memory);
  take(given, "timeline", options.timeline);
  if (given.contains("device") && !given["device"].is_none())
    options.device = given["device"].cast<at::Device>();
  const py::object reshard = given.contains("reshard_after_forward")
                                 ? py::object(given["reshard_after_forward"])
                                 : py::bool_(true);
  if (py::isinstance<py::bool_>(reshard)) {
    options.after_forward = reshard.cast<bool>() ? Keep::nothing : Keep::all;
  } else {
    options.part_ranks = reshard.cast<int>();
    options.after_forward = options.part_ranks == 1 ? Keep::all : Keep::part;
  }
  std::string prefetch;
  take(given, "backward_prefetch", prefetch);
  options.backward_prefetch.reset();
  if (prefetch == "BACKWARD_PRE") options.backward_prefetch = BackwardPrefetch::BACKWARD_PRE;
  if (prefetch == "BACKWARD_POST") options.backward_prefetch = BackwardPrefetch::BACKWARD_POST;
  return options;
}

using Units = std::vector<std::shared_ptr<parallel::ShardedUnit>>;
std::optional<std::vector<parallel::ShardedUnit*>> pointers(const std::optional<Units>& units) {
  if (!units) return {};
  std::vector<parallel::ShardedUnit*> all;
  for (const auto& unit : *units) all.push_back(unit.get());
  return all;
}

/// `function(output, input, group)` in place of a collective; None: the collective again.
parallel::ShardedCommunication::Exchange exchange_of(const py::object& function) {
  if (function.is_none()) return {};
  return [held = kept(function)](const Tensor& output, const Tensor& input, const Group& group) {
    const py::gil_scoped_acquire gil;
    (*held)(output, input, group);
  };
}

/// How units communicate and what they keep: the settings of FSDPModule.
template <class Class>
void bind_unit_settings(Class& unit) {
  using parallel::Keep;
  using parallel::ShardedUnit;
  unit.def(
          "set_after_forward",
          [](ShardedUnit& self, bool reshard) {
            self.set_after_forward(reshard ? Keep::nothing : Keep::all);
          },
          Released())
      .def("set_keep_after_backward", &ShardedUnit::set_keep_after_backward, Released())
      .def("set_unshard_in_backward", &ShardedUnit::set_unshard_in_backward, Released())
      .def(
          "set_keep_storage",
          [](ShardedUnit& self, bool on) { self.parameters().set_keep_storage(on); }, Released())
      .def(
          "set_forward_prefetch",
          [](ShardedUnit& self, const std::optional<Units>& units) {
            self.set_forward_prefetch(pointers(units));
          },
          Released())
      .def(
          "set_backward_prefetch",
          [](ShardedUnit& self, const std::optional<Units>& units) {
            self.set_backward_prefetch(pointers(units));
          },
          Released())
      .def("set_all_gather",
           [](ShardedUnit& self, const py::object& function) {
             self.parameters().communication().all_gather = exchange_of(function);
           })
      .def("set_reduce_scatter",
           [](ShardedUnit& self, const py::object& function) {
             self.parameters().communication().reduce_scatter = exchange_of(function);
           })
      .def("set_all_reduce",
           [](ShardedUnit& self, const py::object& function) {
             self.parameters().communication().all_reduce =
                 [held = kept(function)](const Tensor& gradients, const Group& group) {
                   const py::gil_scoped_acquire gil;
                   (*held)(gradients, group);
                 };
           })
      .def("set_after_reduction",
           [](ShardedUnit& self, const py::object& function) {
             self.parameters().communication().after_reduction =
                 [held = kept(function)](const Tensor& gradients) {
                   const py::gil_scoped_acquire gil;
                   (*held)(gradients);
                 };
           })
      .def("set_compression",
           [](ShardedUnit& self, const std::optional<std::string>& gradients,
              const std::optional<std::string>& parameters) {
             self.parameters().communication().gradient_compression = compression_of(gradients);
             self.parameters().communication().parameter_compression = compression_of(parameters);
           })
      .def("set_divisor",
           [](ShardedUnit& self, std::optional<double> divisor) {
             self.parameters().communication().divisor = divisor;
           })
      .def("set_reduce_over_replicas",
           [](ShardedUnit& self, bool on) {
             self.parameters().communication().reduce_over_replicas = on;
           })
      .def("set_gradient_sink", [](ShardedUnit& self, const py::object& function) {
        if (function.is_none()) return self.parameters().set_gradient_sink({});
        self.parameters().set_gradient_sink(
            [held = kept(function)](std::size_t index, const Tensor& reduced) {
              const py::gil_scoped_acquire gil;
              (*held)(index, reduced);
            });
      });
}

void bind_timeline(py::module_& module) {
  using parallel::ShardedTimeline;
  py::class_<ShardedTimeline, std::shared_ptr<ShardedTimeline>>(module, "_ShardedTimeline")
      .def(py::init<>())
      .def("clear", &ShardedTimeline::clear, Released())
      .def("entries", [](const ShardedTimeline& self) {
        std::vector<std::tuple<std::string, std::string, double>> all;
        const auto entries = [&self] {
          const py::gil_scoped_release out;
          return self.entries();
        }();
        for (const auto& entry : entries)
          all.emplace_back(entry.unit, parallel::name_of(entry.event),
                           std::chrono::duration<double>(entry.at.time_since_epoch()).count());
        return all;
      });
}

/// The plan with which `muster-lab fsdp` compares the meters.
void bind_plan(py::module_& module) {
  module.def("_plan_memory",
             [](std::int64_t outer, const std::vector<std::int64_t>& units, const py::dict& given) {
               parallel::MemoryPlanOptions options;
               take(given, "ranks", options.ranks);
               take(given, "keeps_after_forward", options.keeps_after_forward);
               take(given, "part_ranks", options.part_ranks);
               take(given, "gathered_ahead", options.gathered_ahead);
               take(given, "bytes_per_element", options.bytes_per_element);
               take(given, "gathered_bytes_per_element", options.gathered_bytes_per_element);
               take(given, "reduced_bytes_per_element", options.reduced_bytes_per_element);
               take(given, "optimizer_states", options.optimizer_states);
               const parallel::MemoryPlan plan = parallel::plan_memory(outer, units, options);
               py::dict all;
               all["parameters"] = plan.parameters;
               all["gradients"] = plan.gradients;
               all["optimizer"] = plan.optimizer;
               all["gathered_peak"] = plan.gathered_peak;
               all["staging_peak"] = plan.staging_peak;
               return all;
             });
}

}  // namespace

void bind_sharded(py::module_& module) {
  using parallel::ShardedUnit;
  using Tensors = std::vector<std::pair<std::string, Tensor>>;
  bind_timeline(module);
  bind_plan(module);
  py::class_<ShardedUnit, std::shared_ptr<ShardedUnit>> unit(module, "_ShardedUnit",
                                                             let_go_without_gil<ShardedUnit>());
  bind_unit_settings(unit);
  unit.def(py::init([](std::string class_name, const Tensors& parameters, const Tensors& buffers,
                       const Group& group, const py::dict& given,
                       const std::optional<std::vector<std::int64_t>>& shard_dims) {
             const parallel::ModuleParts parts{.class_name = std::move(class_name),
                                               .parameters = named(parameters, {}),
                                               .buffers = named(buffers, {})};
             const auto options = unit_options_of(group, given, shard_dims);
             return blocking(group, [&] { return std::make_shared<ShardedUnit>(parts, options); });
           }),
           py::arg("class_name"), py::arg("parameters"), py::arg("buffers"), py::arg("group"),
           py::arg("options"), py::arg("shard_dims") = py::none())
      .def("before_forward",
           [](ShardedUnit& self, std::vector<Tensor> inputs) {
             return blocking(self.group(), [&] { return self.before_forward(std::move(inputs)); });
           })
      .def(
          "after_forward",
          [](ShardedUnit& self, const std::vector<Tensor>& outputs) {
            self.after_forward(outputs);
          },
          Released())
      .def("leave_forward", &ShardedUnit::leave_forward, Released())
      .def("unshard", [](ShardedUnit& self) { blocking(self.group(), [&] { self.unshard(); }); })
      .def("start_unshard", &ShardedUnit::start_unshard, Released())
      .def("reshard", &ShardedUnit::reshard, Released())
      .def("reset", &ShardedUnit::reset, Released())
      .def("reduce_now",
           [](ShardedUnit& self) { blocking(self.group(), [&] { self.reduce_now(); }); })
      .def_property_readonly("is_unsharded", released<&ShardedUnit::is_unsharded>())
      .def_property_readonly("is_gathering",
                             [](ShardedUnit& self) { return self.parameters().is_gathering(); })
      .def_property_readonly("has_gathered",
                             [](ShardedUnit& self) { return self.parameters().has_gathered(); })
      .def_property_readonly("is_first", &ShardedUnit::is_first)
      .def_property_readonly("was_root", released<&ShardedUnit::was_root>())
      .def_property_readonly("replicas", &ShardedUnit::replicas)
      .def("memory",
           [](ShardedUnit& self) {
             const auto& meter = self.parameters().meter();
             py::dict all;
             all["parameters"] = self.parameters().shard_bytes();
             all["gradients"] = self.parameters().gradient_bytes();
             all["gathered"] = meter.gathered.now();
             all["gathered_peak"] = meter.gathered.peak();
             all["staging_peak"] = meter.staging.peak();
             return all;
           })
      .def("reset_peak_memory",
           [](ShardedUnit& self) {
             self.parameters().meter().gathered.reset_peak();
             self.parameters().meter().staging.reset_peak();
           })
      .def_property("require_sync", released<&ShardedUnit::require_sync>(),
                    released<&ShardedUnit::set_require_sync>())
      .def_property_readonly("group", &ShardedUnit::group)
      .def("summon", [](ShardedUnit& self) { blocking(self.group(), [&] { self.summon(); }); })
      .def("end_summon", &ShardedUnit::end_summon, Released())
      .def_property_readonly("is_summoned", released<&ShardedUnit::is_summoned>())
      .def_property_readonly("unsharded_bytes",
                             [](ShardedUnit& self) { return self.parameters().unsharded_bytes(); })
      .def("parameters",
           [](ShardedUnit& self) {
             std::vector<Tensor> all;
             for (std::size_t i = 0; i < self.parameters().size(); ++i)
               all.push_back(self.parameters()[i]);
             return all;
           })
      .def("sizes_of", [](ShardedUnit& self,
                          std::size_t index) { return self.parameters().sizes_of(index).vec(); })
      .def("shard",
           [](ShardedUnit& self, std::size_t index) {
             if (index >= self.parameters().size()) throw py::index_error();
             return self.parameters().shard(index);
           })
      .def_property_readonly("names",
                             [](ShardedUnit& self) {
                               std::vector<std::string> all;
                               for (std::size_t i = 0; i < self.parameters().size(); ++i)
                                 all.push_back(self.parameters().name(i));
                               return all;
                             })
      .def("drop_gradients", &ShardedUnit::drop_gradients, Released())
      .def("full",
           [](ShardedUnit& self) {
             return blocking(self.group(), [&] { return self.parameters().full(); });
           })
      .def("full_of",
           [](ShardedUnit& self, const std::vector<Tensor>& shards) {
             return blocking(self.group(), [&] { return self.parameters().full_of(shards); });
           })
      .def(
          "shard_of",
          [](ShardedUnit& self, std::size_t index, const Tensor& whole) {
            return self.parameters().shard_of(index, whole);
          },
          Released());
  module.def("_is_sharded", &parallel::is_sharded, Released());
  module.def("_materialize", &parallel::materialize, py::arg("tensor"), py::arg("device"));
  module.def(
      "_clip_grad_norm", [](const std::vector<std::shared_ptr<ShardedUnit>>& units,
                            const std::vector<Tensor>& others, double max_norm, double norm_type) {
        std::vector<ShardedUnit*> all;
        for (const auto& unit : units) all.push_back(unit.get());
        return blocking(units.empty() ? nullptr : units.front()->group(),
                        [&] { return parallel::clip_grad_norm(all, others, max_norm, norm_type); });
      });
}

}  // namespace muster::python
