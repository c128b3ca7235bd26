// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/creation/backend_registry.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <pybind11/chrono.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "bindings.h"
#include "blocking.h"
#include "core/collective/op.h"
#include "core/group/call/call.h"
#include "core/group/errors.h"
#include "core/group/world.h"
#include "core/wait/callbacks.h"
#include "no_gil.h"
#include "pg_options.h"

// Backends written in Python (muster/backends.py defines their interface), and those of plugin
// libraries.
namespace muster::python {
namespace {

namespace py = pybind11;

using Lists = std::vector<std::vector<at::Tensor>>;

Lists listed(const Slices& slices) {
  Lists lists;
  for (const Slice& slice : slices) lists.emplace_back(slice.begin(), slice.end());
  return lists;
}

/// A call as a Python object, which Python may keep.
struct RequestOfPython {
  explicit RequestOfPython(const BackendCall& call)
      : op(call.op()),
        name(call.name()),
        inputs(listed(call.inputs())),
        outputs(listed(call.outputs())),
        reduce_op(call.reduce_op()),
        root(call.root()),
        peer(call.peer()),
        tag(call.tag()),
        async_op(call.is_async()),
        sequence(call.number()),
        deadline(call.deadline()) {}

  Op op;
  std::string name;
  Lists inputs, outputs;
  ReduceOp reduce_op;
  int root;
  int peer;
  std::int64_t tag;
  bool async_op;
  std::uint64_t sequence;
  TimePoint deadline;
};

std::vector<at::Tensor> flat(const Lists& lists) {
  std::vector<at::Tensor> tensors;
  for (const auto& list : lists) tensors.insert(tensors.end(), list.begin(), list.end());
  return tensors;
}

/// The result of a backend's `submit`: an object with `wait()`, or None if the call has completed.
class WorkOfPython final : public Work, public std::enable_shared_from_this<WorkOfPython> {
 public:
  /// `source`: the message's sender, as a rank of the default group; -1: unknown, or not a message.
  WorkOfPython(std::string backend, const py::object& pending, const RequestOfPython& request,
               int source)
      : backend_(std::move(backend)),
        pending_(pending.is_none() ? nullptr : kept(pending)),
        outputs_(flat(request.outputs)),
        source_(source),
        done_(!pending_) {}

  bool is_completed() override {
    if (done_) return true;
    const py::gil_scoped_acquire held;
    for (const char* name : {"is_completed", "done"})
      if (py::hasattr(*pending_, name)) return pending_->attr(name)().cast<bool>();
    return false;
  }
  bool is_success() override { return is_completed() && exception() == nullptr; }
  bool wait(std::optional<Duration> timeout) override {
    if (timeout && !done_) {
      get_future();  // its thread waits
      std::unique_lock lock(mutex_);
      if (!ended_.wait_for(lock, *timeout, [&] { return done_.load(); })) {
        throw DistBackendError("an operation of the backend '" + backend_ +
                                   "' did not end within " + describe(*timeout) + "; it goes on",
                               Code::timed_out, {});
      }
    } else {
      finish();
    }
    if (const auto error = failure()) std::rethrow_exception(error);
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard lock(mutex_);
      if (future_) return future_;
      future = future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    if (done_) {
      end(*future);  // it has no callbacks yet
    } else {
      CallbackExecutor::of_process().run(
          [self = shared_from_this(), scope = std::weak_ptr(WorldScope::current())] {
            const WorldScope::Binding bound(scope.lock());  // callbacks make calls on its groups
            self->finish();
            self->end(*self->future_);
          });
    }
    return future;
  }
  int source_rank() override {
    if (source_ >= 0 || !pending_) return source_;
    const py::gil_scoped_acquire held;
    return py::hasattr(*pending_, "source_rank") ? pending_->attr("source_rank")().cast<int>()
                                                 : source_;
  }
  std::exception_ptr exception() override {
    if (is_completed()) finish();
    return failure();
  }
  std::vector<at::Tensor> result() override { return outputs_; }

 private:
  void end(c10::ivalue::Future& future) {
    if (const auto error = failure()) return future.setError(error);
    future.markCompleted(c10::IValue(outputs_));
  }
  void finish() {
    if (done_) return;
    std::exception_ptr failure;
    try {
      const py::gil_scoped_acquire held;
      pending_->attr("wait")();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    if (done_) return;  // another thread has waited, too
    failure_ = failure;
    done_ = true;
    ended_.notify_all();
  }
  std::exception_ptr failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  const std::string backend_;
  const std::shared_ptr<py::object> pending_;
  const std::vector<at::Tensor> outputs_;
  const int source_;
  std::atomic<bool> done_;  // set after failure_
  std::mutex mutex_;        // guards the following
  std::condition_variable ended_;
  std::exception_ptr failure_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // once it was asked for
};

constexpr const char* kOfTorch =
    "a backend of torch.distributed serves in torch.distributed only, beside backend `muster` too "
    "(import muster.torch)";

/// Calls what a user has registered. A function in C++ that takes other arguments is one of
/// torch.distributed's extensions, most likely.
template <class... Arguments>
py::object made_by(const std::string& name, const py::object& func, const Arguments&... arguments) {
  try {
    return func(arguments...);
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError) || PyCFunction_Check(func.ptr()) == 0) throw;
    throw DistError(
        "backend '" + name +
        "': the function that it was registered with does not take muster's arguments; " +
        kOfTorch + ". " + error.what());
  }
}

void check_made(const std::string& name, const py::object& made) {
  if (!made.is_none() && py::hasattr(made, "submit")) return;
  const auto theirs = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  const bool is_of_torch = py::isinstance(made, theirs);
  throw DistError("backend '" + name +
                  "': the function that it was registered with gave no backend "
                  "(ProcessGroupBackend)" +
                  (is_of_torch ? std::string("; ") + kOfTorch : ""));
}

/// A backend of Python's, as groups know it.
class BackendOfPython final : public ProcessGroupBackend {
 public:
  BackendOfPython(std::string name, py::object backend, std::vector<int> global_ranks)
      : name_(std::move(name)),
        has_{.name = name_},
        backend_(kept(std::move(backend))),
        global_ranks_(std::move(global_ranks)) {}

  const BackendCapabilities& capabilities() const override { return has_; }
  bool supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                std::string* why) const override {
    const py::gil_scoped_acquire held;
    const py::object says = backend_->attr("supports")(std::string(collective::info(op).name),
                                                       dtype, c10::DeviceTypeName(device, true));
    if (!py::isinstance<py::str>(says)) return says.cast<bool>();
    *why = says.cast<std::string>();
    return false;
  }
  WorkRef submit(BackendCall& call) override {
    if (call.is_refused()) return nullptr;  // Python has not seen the call
    const py::gil_scoped_acquire held;
    const RequestOfPython request(call);
    const py::object pending = backend_->attr("submit")(request);
    if (!request.async_op && request.op != Op::recv) {
      if (!pending.is_none()) pending.attr("wait")();
      return nullptr;
    }
    const bool known = request.op == Op::recv && request.peer != kAnyRank;
    auto work = std::make_shared<WorkOfPython>(
        name_, pending, request,
        known ? global_ranks_.at(static_cast<std::size_t>(request.peer)) : -1);
    if (!request.async_op) work->wait({});
    return work;
  }
  std::shared_ptr<void> scope(BackendScope) override { return nullptr; }
  BackendState state() const override {
    const std::lock_guard lock(mutex_);
    return {.failure = failure_};
  }
  Status close(TimePoint deadline) override {
    const py::gil_scoped_acquire held;
    try {
      backend_->attr("close")(std::max(
          Duration::zero(), std::chrono::duration_cast<Duration>(deadline - steady_clock().now())));
    } catch (const std::exception& error) {
      return {Code::internal, "backend '" + name_ + "' could not be closed: " + error.what()};
    }
    return {};
  }
  void abort(const std::string& reason) override {
    {
      const std::lock_guard lock(mutex_);
      if (failure_.ok()) failure_ = Status(Code::aborted, reason);
    }
    const py::gil_scoped_acquire held;
    backend_->attr("abort")(reason);
  }

 private:
  const std::string name_;
  const BackendCapabilities has_;
  const std::shared_ptr<py::object> backend_;
  const std::vector<int> global_ranks_;
  mutable std::mutex mutex_;
  Status failure_;
};

void bind_request(py::module_& module) {
  py::class_<RequestOfPython>(
      module, "Request",
      "One call of any operation, as a backend gets it. Ranks in it are positions in the group.")
      .def_property_readonly(
          "op",
          [](const RequestOfPython& self) { return std::string(collective::info(self.op).name); },
          "The operation's name, as `all_reduce`.")
      .def_readonly("name", &RequestOfPython::name, "Name of the function that the user called.")
      .def_readonly(
          "inputs", &RequestOfPython::inputs,
          "A list of lists of tensors: one list for each member where the operation takes one "
          "each, else a single one.")
      .def_readonly("outputs", &RequestOfPython::outputs, "As `inputs`: where the results go.")
      .def_readonly("reduce_op", &RequestOfPython::reduce_op, "ReduceOp.")
      .def_readonly("root", &RequestOfPython::root,
                    "Root of broadcast, reduce, gather and scatter; else -1.")
      .def_readonly("peer", &RequestOfPython::peer, "Peer of send and recv; -1: any.")
      .def_readonly("tag", &RequestOfPython::tag, "Tag of send and recv.")
      .def_readonly("async_op", &RequestOfPython::async_op,
                    "Whether `submit` should return before it is done.")
      .def_readonly("sequence", &RequestOfPython::sequence,
                    "The number of this collective in its group, from 1.")
      .def_property_readonly(
          "timeout",
          [](const RequestOfPython& self) {
            return std::chrono::duration_cast<Duration>(self.deadline - steady_clock().now());
          },
          "datetime.timedelta: what is left until the call's deadline.");
}

}  // namespace

std::shared_ptr<ProcessGroupOptions> pg_options_of(const py::object& given) {
  if (given.is_none()) return nullptr;
  if (py::isinstance<ProcessGroupNCCL::Options>(given))
    return given.cast<std::shared_ptr<ProcessGroupNCCL::Options>>();
  return std::make_shared<OptionsOfPython>(kept(given));
}

void bind_registry(py::module_& module) {
  bind_request(module);
  using Options = DistributedBackendOptions;
  py::class_<Options>(module, "DistributedBackendOptions",
                      "The parts of a group's backend, for functions of the extended form.")
      .def_readonly("store", &Options::store, "A store for this group alone.")
      .def_readonly("group_rank", &Options::group_rank)
      .def_readonly("group_size", &Options::group_size)
      .def_readonly("timeout", &Options::timeout, "datetime.timedelta")
      .def_readonly("group_id", &Options::group_id,
                    "The same on all members, different for every group.")
      .def_readonly("global_ranks_in_group", &Options::global_ranks_in_group,
                    "Ranks of the default group, by rank of this group.");

  module.def(
      "_register_backend",
      [](const std::string& name, const py::function& func, bool extended_api,
         const std::vector<std::string>& devices) {
        group::add_backend(
            name,
            [name, extended_api, make = kept(func)](
                const Options& options, const std::shared_ptr<ProcessGroupOptions>& pg_options)
                -> std::shared_ptr<ProcessGroupBackend> {
              const py::gil_scoped_acquire held;
              const auto* given = dynamic_cast<const OptionsOfPython*>(pg_options.get());
              py::object made =
                  extended_api ? made_by(name, *make, options,
                                         given != nullptr ? *given->object : py::object(py::none()))
                               : made_by(name, *make, options.store, options.group_rank,
                                         options.group_size, options.timeout);
              check_made(name, made);
              return std::make_shared<BackendOfPython>(name, std::move(made),
                                                       options.global_ranks_in_group);
            },
            devices);
      },
      py::arg("name"), py::arg("func"), py::arg("extended_api"), py::arg("devices"));
  module.def(
      "_load_backend_plugin",
      [](const std::string& path) {
        std::vector<std::pair<std::string, std::vector<std::string>>> added;
        for (auto& name : load_backend_plugin(path)) {
          std::vector<std::string> kinds;
          for (const auto type : group::registered_backend(name)->devices)
            kinds.push_back(c10::DeviceTypeName(type, true));
          added.emplace_back(std::move(name), std::move(kinds));
        }
        return added;
      },
      py::arg("path"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace muster::python
