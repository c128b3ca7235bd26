// SPDX-License-Identifier: BSD-3-Clause
#include <atomic>
#include <memory>
#include <utility>

#include "bindings.h"
#include "core/group/errors.h"
#include "muster/dist_autograd.h"
#include "muster/rpc_calls.h"
#include "rpc/autograd/autograd_context.h"
#include "rpc_values.h"
#include "rpc_waiting.h"

// The C++ half of muster/autograd.py.
namespace muster::python {
namespace {

namespace py = pybind11;
namespace dist_autograd = rpc::dist_autograd;

/// `with context() as context_id:`
class Context {
 public:
  std::int64_t enter() {
    if (context_) throw DistError("this context of distributed autograd has been entered already");
    const py::gil_scoped_release released;
    context_ = std::make_unique<dist_autograd::context>();
    return context_->context_id();
  }
  void leave() {
    const py::gil_scoped_release released;
    context_.reset();
  }

 private:
  std::unique_ptr<dist_autograd::context> context_;
};

dist_autograd::Mode mode_of(const std::string& name) {
  if (name == "fast") return dist_autograd::Mode::fast;
  if (name == "smart") return dist_autograd::Mode::smart;
  throw DistError("backward: mode is 'fast' or 'smart', not '" + name + "'");
}

void backward_in_context(std::int64_t context_id, const std::vector<at::Tensor>& roots,
                         bool retain_graph, const std::string& mode) {
  const auto agent = rpc::current_agent("backward");
  struct BackwardPass {
    std::atomic<bool> done{false};
    std::exception_ptr error;
  };
  const auto pass = std::make_shared<BackwardPass>();
  const auto way = mode_of(mode);
  try {
    wait_until(
        agent, [pass] { return pass->done.load(); },
        [&] {
          rpc::DistAutograd::of(*agent)->backward(
              context_id, roots, retain_graph, way,
              [pass, weak = std::weak_ptr<rpc::Agent>(agent)](std::exception_ptr error) {
                pass->error = std::move(error);
                pass->done.store(true);
                if (const auto strong = weak.lock()) strong->wake();
              });
        });
  } catch (py::error_already_set&) {
    throw;
  } catch (...) {
    raise_in_python(std::current_exception());
  }
  if (pass->error) raise_in_python(pass->error);
}

py::dict get_gradients(std::int64_t context_id) {
  dist_autograd::Gradients gradients;
  {
    const py::gil_scoped_release released;
    gradients = dist_autograd::get_gradients(context_id);
  }
  py::dict all;
  for (const auto& [leaf, gradient] : gradients) all[py::cast(leaf)] = py::cast(gradient);
  return all;
}

}  // namespace

void bind_rpc_autograd(py::module_& module) {
  py::class_<Context>(module, "_AutogradContext")
      .def(py::init<>())
      .def("enter", &Context::enter)
      .def("leave", &Context::leave);
  module.def("_autograd_backward", &backward_in_context);
  module.def("_autograd_gradients", &get_gradients);
  module.def("_autograd_current", &dist_autograd::current_context);
}

}  // namespace muster::python
