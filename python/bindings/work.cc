// SPDX-License-Identifier: BSD-3-Clause
#include "muster/work.h"

#include <pybind11/chrono.h>
#include <pybind11/operators.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings.h"
#include "blocking.h"
#include "core/collective/op.h"
#include "muster/op.h"
#include "no_gil.h"

// ReduceOp and Work, which calls of a group take and return.
namespace muster::python {
namespace {

namespace py = pybind11;

constexpr std::pair<const char*, ReduceOp::Kind> kKinds[] = {
    {"SUM", ReduceOp::SUM},   {"PRODUCT", ReduceOp::PRODUCT}, {"MIN", ReduceOp::MIN},
    {"MAX", ReduceOp::MAX},   {"BAND", ReduceOp::BAND},       {"BOR", ReduceOp::BOR},
    {"BXOR", ReduceOp::BXOR}, {"AVG", ReduceOp::AVG},         {"PREMUL_SUM", ReduceOp::PREMUL_SUM}};

}  // namespace

void bind_reduce_op(py::module_& module) {
  py::class_<ReduceOp> op(module, "ReduceOp",
                          "How values are combined. PREMUL_SUM by itself has the factor 1.");
  for (const auto& [name, kind] : kKinds) op.attr(name) = ReduceOp(kind);
  op.attr("RedOpType") = op;  // the values' class in torch
  op.def(py::init<const ReduceOp&>(), py::arg("op"))
      .def_property_readonly(
          "op", [](const ReduceOp& self) { return ReduceOp(self.kind()); },
          "The operation without its factor.")
      .def_property_readonly(
          "factor", [](const ReduceOp& self) { return self.factor(); },
          "PREMUL_SUM multiplies each rank's input by it; 1 for other operations.")
      .def_property_readonly(
          "name", [](const ReduceOp& self) { return kKinds[self.kind()].first; },
          "For example `SUM`.")
      .def_property_readonly(
          "value", [](const ReduceOp& self) { return static_cast<int>(self.kind()); },
          "The operation's number in torch.")
      .def("__int__", [](const ReduceOp& self) { return static_cast<int>(self.kind()); })
      .def(py::self == py::self)
      .def(py::pickle(
          [](const ReduceOp& self) {
            return py::make_tuple(static_cast<int>(self.kind()), self.factor());
          },
          [](const py::tuple& state) {
            const auto kind = state[0].cast<int>();
            if (kind < ReduceOp::SUM || kind > ReduceOp::PREMUL_SUM)
              throw py::value_error("this pickle holds no ReduceOp");
            return kind == ReduceOp::PREMUL_SUM ? ReduceOp::premul_sum(state[1].cast<double>())
                                                : ReduceOp(static_cast<ReduceOp::Kind>(kind));
          }))
      .def("__hash__", [](const ReduceOp& self) { return static_cast<int>(self.kind()); })
      .def("__repr__", [](const ReduceOp& self) {
        return "<ReduceOp." + std::string(collective::name_of(collective::engine_reduce(self))) +
               ">";
      });
  module.def("_make_nccl_premul_sum", &ReduceOp::premul_sum, py::arg("factor"),
             "A ReduceOp: each rank's input times its factor, then summed.");
}

void bind_work(py::module_& module) {
  const auto without_gil_held = py::call_guard<py::gil_scoped_release>();
  const auto wait = [](const GroupWork& self, std::optional<Duration> timeout) {
    if (timeout == Duration::zero()) timeout.reset();
    return without_gil([group = self.group] { interrupt(group.lock()); },
                       [&] { return self.work->wait(timeout); });
  };
  const auto source_rank = [](const GroupWork& self) { return self.work->source_rank(); };
  py::class_<GroupWork, std::shared_ptr<GroupWork>>(module, "Work", "A started operation.")
      .def(
          "is_completed", [](const GroupWork& self) { return self.work->is_completed(); },
          without_gil_held, "Whether it has ended, well or badly. Never blocks.")
      .def(
          "is_success", [](const GroupWork& self) { return self.work->is_success(); },
          without_gil_held, "Whether it has ended well.")
      .def("wait", wait, py::arg("timeout") = py::none(),
           "Returns True once it is completed; raises what it failed with, and DistBackendError "
           "(`timed out`) when "
           "`timeout` (datetime.timedelta; None or 0: the operation's own) passes first.")
      .def(
          "synchronize", [wait](const GroupWork& self) { wait(self, std::nullopt); },
          "As `wait()`; returns None.")
      .def(
          "get_future",
          [](const GroupWork& self) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(self.work->get_future());
          },
          without_gil_held,
          "torch.futures.Future of the list of output tensors. Its callbacks run on threads of "
          "their own, where they may wait for other "
          "calls; those of futures that are asked for in a backward pass once the pass has made "
          "all its calls.")
      .def("source_rank", source_rank, without_gil_held,
           "Receives, once completed: the rank that sent. -1 for other operations.")
      .def("_source_rank", source_rank, without_gil_held)
      .def(
          "result", [](const GroupWork& self) { return self.work->result(); },
          "The output tensors.")
      .def(
          "exception",
          [](const GroupWork& self) -> py::object {
            std::exception_ptr error;
            {
              const py::gil_scoped_release released;
              error = self.work->exception();
            }
            if (!error) return py::none();
            try {
              std::rethrow_exception(error);
            } catch (const std::exception& thrown) {
              return py::str(thrown.what());
            }
          },
          "Its failure, as text; None while it has not failed.");
}

}  // namespace muster::python
