// SPDX-License-Identifier: BSD-3-Clause
#include <pybind11/functional.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "bindings.h"
#include "blocking.h"
#include "core/group/errors.h"
#include "muster/comm_hook.h"
#include "muster/distributed_data_parallel.h"
#include "muster/power_sgd_hook.h"
#include "no_gil.h"
#include "train/fsdp/sharded_norm.h"
#include "train/fsdp/sharded_parameters.h"
#include "train/fsdp/sharded_plan.h"
#include "train/fsdp/sharded_unit.h"
#include "train/modules/backward_frame.h"
#include "train/modules/module_parts.h"
#include "train/modules/packed_broadcast.h"
#include "train/zero/parameter_owners.h"

// The C++ part of muster/nn, muster/optim and muster/algorithms. Nothing here takes the model's
// lock while holding the GIL, because backward holds that lock when it calls Python hooks.
namespace muster::python {
namespace {

namespace py = pybind11;
using at::Tensor;
using parallel::DataParallelCore;
using Released = py::call_guard<py::gil_scoped_release>;

/// A property whose getter and setter run without the GIL: they take the object's lock.
template <auto Member>
py::cpp_function released() {
  return py::cpp_function(Member, Released());
}

/// The operation that a C++ hook has started.
struct Started {
  std::function<Tensor()> finish;
};
struct NativeHook {
  CommHook hook;
};

/// The collectives of a rank that has run out of inputs.
struct ShadowOfModel {
  std::shared_ptr<DataParallelCore> model;
  std::unique_ptr<JoinHook> hook;
};

Tensor tensor_of(const py::object& value) {
  const bool listed = py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value);
  return (listed ? py::object(py::sequence(value)[0]) : value).cast<Tensor>();
}

/// `hook(bucket)` gives something with `wait()`: a torch.futures.Future of a tensor, or of a list
/// with one.
CommHook in_python(const py::object& given) {
  return [hook = kept(given)](const GradBucket& bucket) -> std::function<Tensor()> {
    const py::gil_scoped_acquire held;
    return [pending = kept((*hook)(bucket))] {
      const py::gil_scoped_acquire held_again;
      return tensor_of(pending->attr("wait")());
    };
  };
}

CommHook hook_of(const py::object& given) {
  return py::isinstance<NativeHook>(given) ? given.cast<NativeHook>().hook : in_python(given);
}

parallel::BackwardFrame frame() {
  return {.throw_as = throw_in_python,
          .wait_in = [](const Group& group, const std::function<void()>& wait) {
            const py::gil_scoped_acquire held;
            blocking(group, wait);
          }};
}

std::vector<parallel::ModuleParts::Named> named(
    const std::vector<std::pair<std::string, Tensor>>& tensors, const std::vector<Tensor>& sparse) {
  std::vector<parallel::ModuleParts::Named> all;
  for (const auto& [name, tensor] : tensors) {
    const auto is_it = [&each = tensor](const Tensor& other) { return other.is_same(each); };
    all.push_back({name, tensor, std::any_of(sparse.begin(), sparse.end(), is_it)});
  }
  return all;
}

template <class Member>
void take(const py::dict& given, const char* name, Member& member) {
  if (given.contains(name) && !given[name].is_none()) member = given[name].cast<Member>();
}

MixedPrecision precision_of(const py::object& given) {
  MixedPrecision config;
  const auto dtype = [&given](const char* name) {
    return given.attr(name).cast<std::optional<at::ScalarType>>();
  };
  config.param_dtype = dtype("param_dtype");
  config.reduce_dtype = dtype("reduce_dtype");
  config.buffer_dtype = dtype("buffer_dtype");
  // Torch's own class has not these two.
  config.keep_low_precision_grads =
      py::getattr(given, "keep_low_precision_grads", py::bool_(false)).cast<bool>();
  config.cast_forward_inputs =
      py::getattr(given, "cast_forward_inputs", py::bool_(true)).cast<bool>();
  return config;
}

/// By the names that they have in C++; those that are None have their defaults.
DistributedDataParallelOptions options_of(const py::dict& given) {
  DistributedDataParallelOptions options;
  if (given.contains("device_ids") && !given["device_ids"].is_none())
    options.device_ids = given["device_ids"].cast<std::vector<int>>();
  if (given.contains("output_device") && !given["output_device"].is_none())
    options.output_device = given["output_device"].cast<int>();
  take(given, "broadcast_buffers", options.broadcast_buffers);
  take(given, "init_sync", options.init_sync);
  take(given, "process_group", options.process_group);
  take(given, "bucket_cap_mb", options.bucket_cap_mb);
  take(given, "find_unused_parameters", options.find_unused_parameters);
  take(given, "check_reduction", options.check_reduction);
  take(given, "gradient_as_bucket_view", options.gradient_as_bucket_view);
  take(given, "static_graph", options.static_graph);
  take(given, "delay_all_reduce_named_params", options.delay_all_reduce_named_params);
  take(given, "param_to_hook_all_reduce", options.param_to_hook_all_reduce);
  if (given.contains("mixed_precision") && !given["mixed_precision"].is_none())
    options.mixed_precision = precision_of(given["mixed_precision"]);
  return options;
}

void set_buffer(GradBucket& bucket, Tensor buffer) {
  const bool sparse = bucket.gradients.size() == 1 && bucket.gradients.front().is_sparse();
  if (buffer.numel() != bucket.buffer.numel())
    group::invalid("GradBucket.set_buffer: the bucket has " +
                   std::to_string(bucket.buffer.numel()) + " elements, the buffer " +
                   std::to_string(buffer.numel()));
  if (!sparse) buffer = buffer.contiguous().view({-1});
  std::int64_t at = 0;
  for (Tensor& gradient : bucket.gradients) {
    const std::int64_t elements = gradient.numel();
    gradient = sparse ? buffer : parallel::shaped_like(buffer, at, gradient);
    at += elements;
  }
  bucket.buffer = std::move(buffer);
}

void bind_hooks(py::module_& module) {
  py::class_<GradBucket>(module, "GradBucket",
                         "A bucket of gradients on its way: what a communication hook gets.")
      .def(
          "index", [](const GradBucket& self) { return self.index; },
          "Its number: buckets come in this order, the same on every rank.")
      .def(
          "buffer", [](const GradBucket& self) { return self.buffer; },
          "All its gradients, one dimension: this rank's own sums, not divided. Complex gradients "
          "are pairs of reals. It may be written "
          "to.")
      .def("set_buffer", &set_buffer, py::arg("buffer"),
           "Sets what `buffer()` gives, and `gradients()` views of; as many elements, else "
           "ValueError (DistArgumentError).")
      .def(
          "gradients", [](const GradBucket& self) { return self.gradients; },
          "Views of the bucket, shaped like their parameters; those of complex ones have one more "
          "dimension, of two.")
      .def(
          "parameters", [](const GradBucket& self) { return self.parameters; },
          "The parameters, in the order of the gradients.")
      .def(
          "is_last", [](const GradBucket& self) { return self.is_last; },
          "Whether it is the last of this backward pass.")
      .def_readonly("group", &GradBucket::group,
                    "The model's own group: what hooks communicate belongs on it.");
  py::class_<Started>(module, "_Started")
      .def(
          "wait", [](const Started& self) { return self.finish(); }, Released());
  py::class_<NativeHook>(module, "_NativeHook")
      .def(
          "__call__",
          [](const NativeHook& self, const GradBucket& bucket) {
            return Started{self.hook(bucket)};
          },
          Released());
  const auto averaging = [&module](const char* name, CommHook (*make)(const Group&)) {
    module.def(
        name, [make](const Group& group) { return NativeHook{make(group)}; },
        py::arg("group") = py::none());
  };
  averaging("_all_reduce_hook", all_reduce_hook);
  averaging("_fp16_compress_hook", fp16_compress_hook);
  averaging("_bf16_compress_hook", bf16_compress_hook);

  using State = PowerSGDState;
  py::class_<State, std::shared_ptr<State>>(module, "_PowerSGDState")
      .def(py::init([](Group group, int rank, std::int64_t start, double min_rate, bool feedback,
                       bool warm_start, double epsilon, std::uint64_t seed,
                       std::int64_t log_frequency, bool batch) {
        return std::make_shared<State>(PowerSGDOptions{std::move(group), rank, start, min_rate,
                                                       feedback, warm_start, epsilon, seed,
                                                       log_frequency, batch});
      }))
      .def_property_readonly("iteration", &State::iteration)
      .def("compression_stats",
           [](const State& self) {
             const auto stats = self.compression_stats();
             return py::make_tuple(stats.rate(), stats.before, stats.after);
           })
      .def("save",
           [](const State& self) {
             torch::serialize::OutputArchive archive;
             self.save(archive);
             std::ostringstream out(std::ios::binary);
             archive.save_to(out);
             return py::bytes(std::move(out).str());
           })
      .def("load", [](State& self, const std::string& bytes) {
        std::istringstream in(bytes, std::ios::binary);
        torch::serialize::InputArchive archive;
        archive.load_from(in);
        self.load(archive);
      });
  module.def("_powerSGD_hook", [](std::shared_ptr<State> state) {
    return NativeHook{powerSGD_hook(std::move(state))};
  });
  module.def("_batched_powerSGD_hook", [](std::shared_ptr<State> state) {
    return NativeHook{batched_powerSGD_hook(std::move(state))};
  });
}

/// By the names that they have in C++; reshard_after_forward is a bool or a number of ranks.
parallel::ShardedUnitOptions unit_options_of(const Group& group, const py::dict& given) {
  using parallel::Keep;
  parallel::ShardedUnitOptions options{.group = group, .frame = frame()};
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
      .def("set_divisor",
           [](ShardedUnit& self, std::optional<double> divisor) {
             self.parameters().communication().divisor = divisor;
           })
      .def("set_reduce_over_replicas", [](ShardedUnit& self, bool on) {
        self.parameters().communication().reduce_over_replicas = on;
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

void bind_sharded(py::module_& module) {
  using parallel::ShardedUnit;
  using Tensors = std::vector<std::pair<std::string, Tensor>>;
  bind_timeline(module);
  bind_plan(module);
  py::class_<ShardedUnit, std::shared_ptr<ShardedUnit>> unit(module, "_ShardedUnit",
                                                             let_go_without_gil<ShardedUnit>());
  bind_unit_settings(unit);
  unit.def(py::init([](std::string class_name, const Tensors& parameters, const Tensors& buffers,
                       const Group& group, const py::dict& given) {
             const parallel::ModuleParts parts{.class_name = std::move(class_name),
                                               .parameters = named(parameters, {}),
                                               .buffers = named(buffers, {})};
             const auto options = unit_options_of(group, given);
             return blocking(group, [&] { return std::make_shared<ShardedUnit>(parts, options); });
           }),
           py::arg("class_name"), py::arg("parameters"), py::arg("buffers"), py::arg("group"),
           py::arg("options"))
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

void bind_parameter_owners(py::module_& module) {
  using Owners = parallel::ParameterOwners;
  py::class_<Owners, std::shared_ptr<Owners>>(module, "_ParameterOwners",
                                              let_go_without_gil<Owners>())
      .def(py::init([](const Group& group, bool in_buckets) {
        return std::make_shared<Owners>(group, in_buckets, [](at::ScalarType dtype) {
          const py::gil_scoped_acquire held;
          return py::str(py::cast(dtype)).cast<std::string>();
        });
      }))
      .def("compare",
           [](const Owners& self, const Owners::Groups& groups) {
             blocking(self.group(), [&] { self.compare(groups); });
           })
      .def("divide", &Owners::divide, Released())
      .def("part_of", &Owners::part_of)
      .def("numbers_of", &Owners::numbers_of)
      .def("rank_of", &Owners::rank_of)
      .def_property_readonly("device", &Owners::device)
      .def("share", [](Owners& self) { blocking(self.group(), [&] { self.share(); }); })
      .def(
          "fail_step",
          [](const Owners& self, const std::string& why, bool in_closure) {
            self.fail_step(std::runtime_error(why), in_closure);
          },
          Released())
      .def("begin_bucket", &Owners::begin_bucket, Released())
      .def("end_bucket",
           [](Owners& self) { return blocking(self.group(), [&] { return self.end_bucket(); }); });
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_hooks(module);
  bind_sharded(module);
  bind_parameter_owners(module);
  py::class_<ShadowOfModel>(module, "_ShadowOfModel")
      .def("main_hook",
           [](const ShadowOfModel& self) {
             blocking(self.model->group(), [&] { self.hook->main_hook(); });
           })
      .def("post_hook", [](const ShadowOfModel& self, bool is_last_joiner) {
        blocking(self.model->group(), [&] { self.hook->post_hook(is_last_joiner); });
      });

  using Core = DataParallelCore;
  using Tensors = std::vector<std::pair<std::string, Tensor>>;
  py::class_<Core, std::shared_ptr<Core>>(module, "_DataParallelCore", let_go_without_gil<Core>())
      .def(py::init([](std::string class_name, const Tensors& parameters, const Tensors& buffers,
                       const std::vector<Tensor>& sparse, const py::dict& given,
                       std::function<std::vector<Tensor>()> buffers_now) {
             const auto options = options_of(given);
             const parallel::ModuleParts parts{.class_name = std::move(class_name),
                                               .parameters = named(parameters, sparse),
                                               .buffers = named(buffers, {}),
                                               .buffers_now = std::move(buffers_now)};
             return blocking(options.process_group,
                             [&] { return std::make_shared<Core>(parts, options, frame()); });
           }),
           py::arg("class_name"), py::arg("parameters"), py::arg("buffers"), py::arg("sparse"),
           py::arg("options"), py::arg("buffers_now"))
      .def("before_forward",
           [](Core& self, const std::vector<Tensor>& parameters, const py::function& names) {
             const auto name_of = [&names](std::size_t index) {
               const py::gil_scoped_acquire held;
               return names().cast<std::vector<std::string>>().at(index);
             };
             blocking(self.group(), [&] { self.before_forward(parameters, name_of); });
           })
      .def("after_forward", &Core::after_forward, Released())
      .def("end_iteration", &Core::end_iteration, Released())
      .def("changes_arguments", &Core::changes_arguments)
      .def("changed", &Core::changed, Released())
      .def(
          "join_hook",
          [](const std::shared_ptr<Core>& self, bool divide_by_initial_world_size) {
            return ShadowOfModel{self, self->join_hook({.divide_by_initial_world_size =
                                                            divide_by_initial_world_size})};
          },
          Released())
      .def("join_device", &Core::join_device)
      .def("join_process_group", &Core::join_process_group)
      .def_property("require_sync", &Core::require_sync, &Core::set_require_sync)
      .def_property_readonly("syncs", &Core::syncs)
      .def("register_comm_hook",
           [](Core& self, const py::object& given) {
             auto hook = hook_of(given);
             const py::gil_scoped_release released;
             self.register_comm_hook(std::move(hook));
           })
      .def("set_sample_rate", &Core::set_sample_rate, Released())
      .def_property_readonly("group", &Core::group)
      .def_property_readonly("output_device", &Core::output_device)
      .def("bucket_bytes", &Core::bucket_bytes, Released())
      .def("buckets_rebuilt", &Core::buckets_rebuilt, Released());
}

}  // namespace muster::python
