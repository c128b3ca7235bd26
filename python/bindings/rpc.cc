// SPDX-License-Identifier: BSD-3-Clause
#include "muster/rpc_calls.h"

#include <atomic>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>

#include "bindings.h"
#include "blocking.h"
#include "core/group/errors.h"
#include "muster/store.h"
#include "no_gil.h"
#include "python_store.h"
#include "rpc/agent/agent.h"
#include "rpc/autograd/autograd_context.h"
#include "rpc/backends.h"
#include "rpc/functions.h"
#include "rpc/rref/rref_context.h"
#include "rpc_values.h"
#include "rpc_waiting.h"

// The C++ half of muster/rpc. A call of a Python function is a message of its own kind, whose value
// is a pickle of (function, args, kwargs). Its sender has proved the job's secret when the link was
// established. The GIL is held while Python objects are accessed, and never while waiting.
namespace muster::python {
namespace {

namespace py = pybind11;
using rpc::Agent;
using rpc::Answer;
using Fill = std::function<void(rpc::Value&, rpc::ValueDelivery&)>;

constexpr auto kPythonCall = rpc::MessageKind::user_first;
/// Creates the values of references by a registered function.
constexpr const char* kServed = "muster::python::call";

rpc::To to_of(const py::object& given) {
  if (py::isinstance<py::str>(given)) return {given.cast<std::string>()};
  if (py::isinstance<rpc::WorkerInfo>(given)) return {given.cast<const rpc::WorkerInfo&>()};
  if (py::isinstance<py::int_>(given) && !py::isinstance<py::bool_>(given))
    return {given.cast<int>()};
  throw DistError("a worker is named by its name, its rank or its WorkerInfo, not by " +
                  py::repr(given).cast<std::string>());
}

Duration duration_of(double seconds, const char* what) {
  if (std::isnan(seconds) || seconds < 0)
    throw DistError(std::string(what) + ": a time in seconds must not be negative; zero is none");
  if (seconds > 1e9) return Duration::zero();
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}
double seconds_of(Duration duration) { return std::chrono::duration<double>(duration).count(); }

/// -1, torch's UNSET_RPC_TIMEOUT, is the agent's.
rpc::CallOptions options_of(double timeout) {
  rpc::CallOptions options;
  if (timeout != -1) options.timeout = duration_of(timeout, "timeout");
  return options;
}

// ---- serving

/// Completes a call whose function returned a future.
class LateAnswer {
 public:
  explicit LateAnswer(rpc::ResponderRef responder) : responder_(std::move(responder)) {}
  void value(py::object result) {
    const auto made = outcome(responder_, std::move(result));
    const py::gil_scoped_release released;
    answer(responder_, made);
  }
  void error(const py::object& exception) {
    const auto thrown = described(exception);
    const py::gil_scoped_release released;
    responder_->fail(thrown);
  }

 private:
  rpc::ResponderRef responder_;
};

void serve(rpc::Value& arguments, rpc::ValueDelivery& delivery,
           const rpc::ResponderRef& responder) {
  auto pickle = rpc::unpack<Pickled>(arguments, delivery);
  arguments = {};  // they are the function's now
  if (!responder)
    throw DistError("a call of a Python function that wants no answer is none of muster's",
                    Code::refused);
  if (is_python_ending()) throw DistError("the Python of this worker is ending", Code::closed);
  Outcome made;
  {
    const py::gil_scoped_acquire held;
    try {
      const Inside& python = inside();
      auto tensors = py::cast(std::move(pickle.tensors));
      py::list references;
      for (auto& each : pickle.references)
        references.append(std::make_shared<Reference>(Reference{std::move(each)}));
      py::object result = python.serve(py::bytes(pickle.bytes), std::move(tensors),
                                       std::move(references), LateAnswer(responder));
      if (result.is(python.later)) return;
      made = outcome(responder, std::move(result));
    } catch (const py::error_already_set& thrown) {
      made.error = described(thrown);
    }
  }
  answer(responder, made);
}

// ---- calling

struct What {
  rpc::MessageKind kind;
  std::string name;
  Fill fill;
};
/// `function`: text names one of C++'s or of torch's operators, with `arguments` as a sequence;
/// else `arguments` is what is to be pickled.
What what_of(const py::object& function, const py::object& arguments, const std::string& name) {
  if (py::isinstance<py::str>(function))
    return {rpc::MessageKind::call, name, plain_arguments(name, arguments)};
  return {kPythonCall, name,
          [pickle = pickled(arguments)](rpc::Value& value, rpc::ValueDelivery& delivery) {
            rpc::pack(value, delivery, pickle);
          }};
}

Agent::OutgoingCall call_of(const Agent& agent, const py::object& to, What what, double timeout) {
  Agent::OutgoingCall call;
  call.to = agent.worker(to_of(to)).id();
  call.kind = what.kind;
  call.name = std::move(what.name);
  call.fill = std::move(what.fill);
  call.options = options_of(timeout);
  return call;
}

/// Converts an answer to a Python object. Requires the GIL.
py::object value_of(const std::string& name, const Answer& answer) {
  if (answer.error) raise_in_python(answer.error);
  return result_of(name, answer);
}

py::object rpc_sync(const py::object& to, const py::object& function, const py::object& arguments,
                    const std::string& name, double timeout) {
  const auto agent = rpc::current_agent("rpc_sync");
  return value_of(
      name,
      wait_for_answer(agent, call_of(*agent, to, what_of(function, arguments, name), timeout)));
}

/// An asynchronous call.
class StartedCall : public std::enable_shared_from_this<StartedCall> {
 public:
  StartedCall(const std::shared_ptr<Agent>& agent, std::string name, const py::object& future)
      : agent_(agent), name_(std::move(name)), future_(kept(future)) {}

  void start(Agent::OutgoingCall call) {
    // Callbacks of the future belong to the context in which the call was made.
    complete_ = rpc::keep_autograd_context([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->complete();
    });
    const py::gil_scoped_release released;
    agent_->call(std::move(call),
                 [self = shared_from_this()](Answer answer) { self->answered(std::move(answer)); });
  }

  /// Waits until the future is completed, or until another thread is about to complete it.
  void wait() {
    waiters_.fetch_add(1);
    try {
      wait_until(agent_, [self = shared_from_this()] { return self->answered_.load(); });
    } catch (...) {
      waiters_.fetch_sub(1);
      if (answered_.load()) complete_on_waiter();
      throw;
    }
    waiters_.fetch_sub(1);
    complete_on_waiter();
  }
  /// The future has callbacks, which may block: they do not run on a thread that waits for it.
  void has_callbacks() { calls_back_.store(true); }
  py::object result() const { return value_of(name_, answer_); }

 private:
  void answered(Answer answer) {
    answer_ = std::move(answer);
    answered_.store(true);
    // A waiting thread completes the future itself.
    if (waiters_.load() == 0) complete_apart();
  }
  void complete_on_waiter() { calls_back_.load() ? complete_apart() : complete(); }
  void complete_apart() {
    agent_->run_callback([self = shared_from_this()] { self->complete_(); });
  }
  void complete() {
    if (completed_.exchange(true) || is_python_ending()) return;
    const py::gil_scoped_acquire held;
    const auto future = std::exchange(future_, nullptr);
    try {
      inside().complete(*future, shared_from_this());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the completion of a future of muster.rpc");
    }
    answer_ = {};
  }

  const std::shared_ptr<Agent> agent_;
  const std::string name_;
  std::shared_ptr<py::object> future_;  // Python's
  std::function<void()> complete_;
  Answer answer_;  // written before answered_ is set
  // A waiter counts itself before it reads `answered_`; the answering thread sets that before it
  // reads the count. Both are seq_cst, so at least one of them completes the future; `completed_`
  // lets only the first do it.
  std::atomic<bool> answered_{false};
  std::atomic<int> waiters_{0};
  std::atomic<bool> calls_back_{false};
  std::atomic<bool> completed_{false};
};

std::shared_ptr<StartedCall> rpc_async(const py::object& to, const py::object& function,
                                       const py::object& arguments, const std::string& name,
                                       double timeout, const py::object& future) {
  const auto agent = rpc::current_agent("rpc_async");
  auto call = call_of(*agent, to, what_of(function, arguments, name), timeout);
  auto started = std::make_shared<StartedCall>(agent, name, future);
  started->start(std::move(call));
  return started;
}

// ---- references

ReferenceRef remote(const py::object& to, const py::object& function, const py::object& arguments,
                    const std::string& name, double timeout) {
  const auto agent = rpc::current_agent("remote");
  const int worker = agent->worker(to_of(to)).id();
  const auto options = options_of(timeout);
  auto what = what_of(function, arguments, name);
  const py::gil_scoped_release released;
  auto held = rpc::RRefContext::of(*agent)->create_at(
      worker, what.kind == kPythonCall ? kServed : what.name, what.fill, options);
  return std::make_shared<Reference>(Reference{rpc::RRef<Anything>(std::move(held))});
}

py::object local_value(const Reference& self) {
  const rpc::RRefHandle& held = *self.rref.hold();
  if (held.is_owner()) {
    const auto agent = held.context().agent();
    held.context().check(held);
    if (!held.slot()->done()) wait_until(agent, [slot = held.slot()] { return slot->done(); });
    if (const auto error = held.slot()->error()) raise_in_python(error);
  }
  return object_of(rpc::detail::kept_value(held, "local_value"));  // throws elsewhere
}

py::object to_here(const Reference& self, double timeout) {
  const rpc::RRefHandle& held = *self.rref.hold();
  if (held.is_owner()) return local_value(self);
  held.context().check(held);
  Agent::OutgoingCall call;
  call.to = held.owner();
  call.kind = rpc::kRRefFetch;
  call.name = "to_here";
  call.options = options_of(timeout);
  call.fill = [&held](rpc::Value& value, rpc::ValueDelivery& delivery) {
    rpc::ValueOutput archive(value, delivery);
    rpc::encode_rref(archive, held.reference().rref);
  };
  return value_of("to_here", wait_for_answer(held.context().agent(), std::move(call)));
}

void backward(const Reference& self, std::int64_t context_id, bool retain_graph) {
  const rpc::RRefHandle& held = *self.rref.hold();
  if (held.is_owner()) {
    try {
      without_gil({}, [&] { rpc::detail::backward(held, context_id, retain_graph); });
    } catch (py::error_already_set&) {
      throw;
    } catch (...) {
      raise_in_python(std::current_exception());
    }
    return;
  }
  held.context().check(held);
  Agent::OutgoingCall call;
  call.to = held.owner();
  call.kind = rpc::kRRefBackward;
  call.name = "backward";
  call.options.timeout = Duration::zero();
  call.observed = false;
  call.fill = [&](rpc::Value& value, rpc::ValueDelivery& delivery) {
    rpc::ValueOutput archive(value, delivery);
    rpc::encode_rref(archive, held.reference().rref);
    archive(context_id);
    archive(retain_graph);
  };
  value_of("backward", wait_for_answer(held.context().agent(), std::move(call)));
}

py::object proxy(const py::object& self, const char* way, double timeout) {
  return py::module_::import("muster.rpc.inside").attr("RRefProxy")(self, way, timeout);
}

void bind_references(py::module_& module) {
  constexpr auto kDefault = -1.0;
  py::class_<Reference, ReferenceRef>(
      module, "RRef", let_go_without_gil<Reference>(),
      "A reference to a value that stays on one worker, its owner, and lives as long as any worker "
      "holds a reference. `RRef(value)` makes one of a value of this worker.")
      .def(py::init([](const py::object& value, const py::object&) {
             const auto agent = rpc::current_agent("RRef");
             auto held = keep(value);
             const py::gil_scoped_release released;
             return std::make_shared<Reference>(Reference{
                 rpc::RRef<Anything>(rpc::RRefContext::of(*agent)->keep_here(std::move(held)))});
           }),
           py::arg("value"), py::arg("type_hint") = py::none())
      .def(
          "is_owner", [](const Reference& self) { return self.rref.is_owner(); },
          "Whether this worker has the value.")
      .def(
          "owner", [](const Reference& self) { return self.rref.owner(); },
          "The worker that has the value, as WorkerInfo.")
      .def(
          "owner_name", [](const Reference& self) { return self.rref.owner_name(); },
          "The name of the worker that has the value.")
      .def(
          "confirmed_by_owner",
          [](const Reference& self) { return self.rref.confirmed_by_owner(); },
          py::call_guard<py::gil_scoped_release>(),
          "Whether the owner counts this reference; on the owner always True.")
      .def("local_value", &local_value,
           "The value itself, on its owner; waits until it is made and raises what its making "
           "raised. Elsewhere raises DistError.")
      .def("to_here", &to_here, py::arg("timeout") = kDefault,
           "A copy of the value; on its owner the value itself. Blocks, `timeout` seconds at most "
           "(-1: the default, 0: for ever); raises "
           "what its making raised.")
      .def("backward", &backward, py::arg("dist_autograd_ctx_id") = -1,
           py::arg("retain_graph") = false,
           "Backward from the value, a scalar tensor: in the context of that id, or without one "
           "(-1) on the owner alone.")
      .def(
          "rpc_sync",
          [](const py::object& self, double timeout) { return proxy(self, "rpc_sync", timeout); },
          py::arg("timeout") = kDefault,
          "`ref.rpc_sync().method(...)`: what that method of the value returns, run by its owner.")
      .def(
          "rpc_async",
          [](const py::object& self, double timeout) { return proxy(self, "rpc_async", timeout); },
          py::arg("timeout") = kDefault, "`ref.rpc_async().method(...)`: the same as a future.")
      .def(
          "remote",
          [](const py::object& self, double timeout) { return proxy(self, "remote", timeout); },
          py::arg("timeout") = kDefault,
          "`ref.remote().method(...)`: an RRef to what that method returns.")
      .def("__reduce__",
           [](const Reference&) -> py::object {
             throw DistError(
                 "an RRef can be pickled only as a part of a call to another worker, or of its "
                 "answer");
           })
      .def("__repr__", [](const Reference& self) {
        return "<muster.rpc.RRef, owner '" + self.rref.owner_name() +
               (self.rref.is_owner() ? "' (this worker)>" : "'>");
      });
}

// ---- options, start and end

rpc::DeviceName device_of(const py::handle& given) {
  if (py::isinstance<py::int_>(given)) return {given.cast<int>()};
  if (py::isinstance<py::str>(given)) return {given.cast<std::string>()};
  return {given.cast<at::Device>()};
}
rpc::DeviceMap map_of(const py::dict& given) {
  rpc::DeviceMap map;
  for (const auto& [from, into] : given) map.emplace(device_of(from), device_of(into));
  return map;
}
std::vector<rpc::DeviceName> devices_of(const py::sequence& given) {
  std::vector<rpc::DeviceName> devices;
  for (const auto& each : given) devices.push_back(device_of(each));
  return devices;
}

void bind_options(py::module_& module) {
  using Options = rpc::RpcBackendOptions;
  py::class_<Options>(
      module, "RpcBackendOptions",
      "Options of init_rpc: times in seconds, devices as indices of the accelerator's, "
      "text or torch.device. _transports and _channels are accepted for torch's sake.")
      .def(py::init([](int threads, double timeout, std::string init_method, const py::object& maps,
                       const py::object& devices, bool shared_memory, const py::object&,
                       const py::object&) {
             Options options;
             options.num_worker_threads = threads;
             options.rpc_timeout = duration_of(timeout, "rpc_timeout");
             options.init_method = std::move(init_method);
             options.shared_memory = shared_memory;
             if (!maps.is_none()) {
               for (const auto& [to, map] : py::dict(maps))
                 options.set_device_map(to.cast<std::string>(),
                                        map_of(py::reinterpret_borrow<py::dict>(map)));
             }
             if (!devices.is_none()) options.set_devices(devices_of(devices));
             return options;
           }),
           py::kw_only(), py::arg("num_worker_threads") = rpc::kDefaultWorkerThreads,
           py::arg("rpc_timeout") = seconds_of(rpc::kDefaultRpcTimeout),
           py::arg("init_method") = rpc::kDefaultInitMethod, py::arg("device_maps") = py::none(),
           py::arg("devices") = py::none(), py::arg("shared_memory") = true,
           py::arg("_transports") = py::none(), py::arg("_channels") = py::none())
      .def_readwrite("num_worker_threads", &Options::num_worker_threads)
      .def_readwrite("init_method", &Options::init_method)
      .def_readwrite("shared_memory", &Options::shared_memory)
      .def_property(
          "rpc_timeout", [](const Options& self) { return seconds_of(self.rpc_timeout); },
          [](Options& self, double seconds) {
            self.rpc_timeout = duration_of(seconds, "rpc_timeout");
          })
      .def_property_readonly("device_maps",
                             [](const Options& self) {
                               py::dict all;
                               for (const auto& [to, map] : self.device_maps) {
                                 py::dict one;
                                 for (const auto& [from, into] : map)
                                   one[py::cast(from.device())] = py::cast(into.device());
                                 all[py::str(to)] = one;
                               }
                               return all;
                             })
      .def_property_readonly("devices",
                             [](const Options& self) {
                               py::list all;
                               for (const auto& each : self.devices)
                                 all.append(py::cast(each.device()));
                               return all;
                             })
      .def(
          "set_device_map",
          [](Options& self, const std::string& to, const py::dict& map) {
            self.set_device_map(to, map_of(map));
          },
          py::arg("to"), py::arg("device_map"),
          "Sets the devices of this worker's tensors on worker `to`; adds to what was set "
          "before. Answers use the inverse.")
      .def(
          "set_devices",
          [](Options& self, const py::sequence& devices) { self.set_devices(devices_of(devices)); },
          py::arg("devices"),
          "The accelerators of this worker that calls use; where none are given, those of its "
          "device maps.");

  py::class_<rpc::BackendType>(
      module, "BackendType",
      "A kind of RPC agent, by name: NATIVE, and TENSORPIPE, torch's name for its default.")
      .def(py::init<std::string>(), py::arg("name"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("name", [](const rpc::BackendType& self) { return self.name(); })
      .def(
          "__eq__", [](const rpc::BackendType& a, const rpc::BackendType& b) { return a == b; },
          py::is_operator())
      .def("__hash__",
           [](const rpc::BackendType& self) { return std::hash<std::string>()(self.name()); })
      .def("__repr__", [](const rpc::BackendType& self) { return "BackendType." + self.name(); });
  module.def(
      "_register_rpc_backend",
      [](const std::string& name) {
        return rpc::register_backend(
            name, [name](const rpc::BackendRequest&) -> std::shared_ptr<Agent> {
              throw DistError("the RPC backend '" + name +
                              "' was registered in Python: start it by muster.rpc.init_rpc");
            });
      },
      py::call_guard<py::gil_scoped_release>());
  module.attr("BackendType").attr("NATIVE") = rpc::BackendType::NATIVE;
  module.attr("BackendType").attr("TENSORPIPE") = rpc::BackendType::TENSORPIPE;

  using Info = rpc::WorkerInfo;
  py::class_<Info>(module, "WorkerInfo", "A worker, by name and rank. get_worker_info gives it.")
      .def_property_readonly("name", &Info::name)
      .def_property_readonly("id", &Info::id)
      .def(
          "__eq__", [](const Info& a, const Info& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Info& self) { return std::hash<std::string>()(self.name()); })
      .def("__reduce__",
           [](const Info& self) {
             return py::make_tuple(py::module_::import("muster.rpc").attr("get_worker_info"),
                                   py::make_tuple(self.name()));
           })
      .def("__repr__", [](const Info& self) {
        return "WorkerInfo(id=" + std::to_string(self.id()) + ", name=" + self.name() + ")";
      });
}

void bind_life(py::module_& module) {
  module.def("_init_rpc",
             [](const std::string& name, const std::optional<rpc::BackendType>& backend, int rank,
                int world_size, const std::optional<rpc::RpcBackendOptions>& given,
                std::shared_ptr<Store> store) {
               watch_for_interrupts();
               rpc::InitRpcOptions options;
               options.backend = backend;
               options.rank = rank;
               options.world_size = world_size;
               if (given) options.rpc_backend_options = *given;
               if (store) options.store = kept_store(store)->engine();
               blocking_on_store([&] { rpc::init_rpc(name, options); });
             });
  module.def("_shutdown_rpc", [](bool graceful, double timeout) {
    const auto limit = duration_of(timeout, "shutdown");
    const std::weak_ptr<Agent> weak = rpc::current_agent("shutdown");
    without_gil(
        [weak] {
          if (const auto agent = weak.lock()) agent->stop();
        },
        [&] { rpc::shutdown(graceful, limit); });
  });
  module.def("_rpc_is_initialized", &rpc::is_initialized);
  module.def("_is_allowed_operator", &rpc::is_allowed_operator);
  module.def("_allow_operator", &rpc::allow_operator);
  module.def("_worker_info", [](const py::object& worker) {
    return worker.is_none() ? rpc::get_worker_info() : rpc::get_worker_info(to_of(worker));
  });
  module.def("_worker_infos", &rpc::get_worker_infos);
  module.def("_has_device_map",
             [](const py::object& to) { return !rpc::get_device_map(to_of(to)).empty(); });
  module.def("_rpc_timeout", [] { return seconds_of(rpc::get_rpc_timeout()); });
  module.def("_set_rpc_timeout",
             [](double seconds) { rpc::set_rpc_timeout(duration_of(seconds, "set_rpc_timeout")); });
}

}  // namespace

void bind_rpc(py::module_& module) {
  bind_options(module);
  bind_life(module);
  bind_references(module);
  module.def("_rpc_sync", &rpc_sync);
  module.def("_rpc_async", &rpc_async);
  module.def("_remote", &remote);
  py::class_<StartedCall, std::shared_ptr<StartedCall>>(module, "_StartedCall")
      .def("wait", &StartedCall::wait)
      .def("has_callbacks", &StartedCall::has_callbacks)
      .def("result", &StartedCall::result);
  py::class_<LateAnswer>(module, "_LateAnswer")
      .def("value", &LateAnswer::value)
      .def("error", &LateAnswer::error);
  module.def("_set_rpc_inside",
             [](py::object dumps, py::object loads, py::object serving, py::object later,
                py::object describe, py::object error, py::object complete) {
               set_inside({std::move(dumps), std::move(loads), std::move(serving), std::move(later),
                           std::move(describe), std::move(error), std::move(complete)});
               static const bool once = [] {
                 rpc::Function function;
                 function.name = kServed;
                 function.serve = serve;
                 rpc::add_function(std::move(function), nullptr);
                 rpc::extensions().push_back([](Agent& agent) {
                   agent.on(kPythonCall, {.run =
                                              [](rpc::Request request) {
                                                serve(request.message.value, *request.delivery,
                                                      request.responder);
                                              },
                                          .is_short = {}});
                 });
                 return true;
               }();
               static_cast<void>(once);
             });
}

}  // namespace muster::python
