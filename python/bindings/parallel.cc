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
#include "models.h"
#include "muster/comm_hook.h"
#include "muster/distributed_data_parallel.h"
#include "no_gil.h"
#include "train/modules/packed_broadcast.h"
#include "train/zero/parameter_owners.h"

// The C++ part of muster/nn, muster/optim and muster/algorithms. Nothing here takes the model's
// lock while holding the GIL, because backward holds that lock when it calls Python hooks.
namespace muster::python {
namespace {

namespace py = pybind11;
using at::Tensor;
using parallel::DataParallelCore;

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
  averaging("_int8_compress_hook",
            [](const Group& group) { return quantized_hook(Compression::int8, group); });
  averaging("_int4_compress_hook",
            [](const Group& group) { return quantized_hook(Compression::int4, group); });

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
