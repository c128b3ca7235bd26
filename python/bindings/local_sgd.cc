// SPDX-License-Identifier: BSD-3-Clause
#include "muster/local_sgd.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "blocking.h"
#include "no_gil.h"

// The C++ part of muster/local_sgd.py, which makes the outer optimizer.
namespace muster::python {
namespace {

namespace py = pybind11;
using parallel::ReplicaMeetings;

/// A call is interrupted with the group that meets, which a meeting may change.
struct Meetings {
  ReplicaMeetings meetings;
  Meetings(const std::vector<std::vector<at::Tensor>>& fragments,
           const ReplicaMeetings::MeetingSchedule& schedule)
      : meetings(fragments, schedule) {}
  Group group() const { return meetings.group(); }
};

}  // namespace

void bind_local_sgd(py::module_& module) {
  using State = std::vector<std::pair<std::string, at::Tensor>>;
  py::class_<Meetings, std::shared_ptr<Meetings>>(module, "_ReplicaMeetings",
                                                  let_go_without_gil<Meetings>())
      .def(py::init([](std::string name, const std::vector<std::vector<at::Tensor>>& fragments,
                       const Group& group, std::int64_t sync_every, std::int64_t delay, double mix,
                       const std::optional<std::string>& compression, bool error_feedback,
                       std::string refusal, std::optional<Duration> sync_period, bool by_tokens,
                       bool joins) {
             const ReplicaMeetings::MeetingSchedule schedule{
                 .name = std::move(name),
                 .group = group,
                 .sync_every = sync_every,
                 .delay = delay,
                 .sync_period = sync_period.value_or(Duration::zero()),
                 .by_tokens = by_tokens,
                 .mix = mix,
                 .compression = compression_of(compression),
                 .error_feedback = error_feedback,
                 .joins = joins,
                 .refusal = std::move(refusal)};
             return blocking(group,
                             [&] { return std::make_shared<Meetings>(fragments, schedule); });
           }),
           py::arg("name"), py::arg("fragments"), py::arg("group"), py::arg("sync_every"),
           py::arg("delay"), py::arg("mix"), py::arg("compression"), py::arg("error_feedback"),
           py::arg("refusal") = "", py::arg("sync_period") = py::none(),
           py::arg("by_tokens") = false, py::arg("joins") = false)
      .def("set_update",
           [](Meetings& self, const py::object& update) {
             self.meetings.set_update([held = kept(update)] {
               const py::gil_scoped_acquire gil;
               (*held)();
             });
           })
      .def(
          "set_group",
          [](Meetings& self, const Group& group) {
            blocking(group, [&] { self.meetings.set_group(group); });
          },
          py::arg("group"))
      .def(
          "admit", [](Meetings& self, const Group& wider) { self.meetings.admit(wider); },
          py::arg("wider"))
      .def("enter", [](Meetings& self) { blocking(self.group(), [&] { self.meetings.enter(); }); })
      .def(
          "share_optimizer",
          [](Meetings& self, const py::object& save, const py::object& load) {
            const auto saves = kept(save), loads = kept(load);
            blocking(self.group(), [&] {
              self.meetings.share_optimizer(
                  [saves] {
                    const py::gil_scoped_acquire gil;
                    return (*saves)().cast<at::Tensor>();
                  },
                  [loads](const at::Tensor& bytes) {
                    const py::gil_scoped_acquire gil;
                    (*loads)(bytes);
                  });
            });
          },
          py::arg("save"), py::arg("load"))
      .def(
          "replace",
          [](Meetings& self, std::size_t number, at::Tensor parameter) {
            self.meetings.replace(number, std::move(parameter));
          },
          py::arg("number"), py::arg("parameter"))
      .def(
          "step",
          [](Meetings& self, std::int64_t tokens) {
            blocking(self.group(), [&] { self.meetings.step(tokens); });
          },
          py::arg("tokens"))
      .def_property_readonly("tokens", [](Meetings& self) { return self.meetings.tokens(); })
      .def_property_readonly("group", [](Meetings& self) { return self.group(); })
      .def_property_readonly("is_admitting",
                             [](Meetings& self) { return self.meetings.is_admitting(); })
      .def_property_readonly("steps", [](Meetings& self) { return self.meetings.steps(); })
      .def_property_readonly("meetings", [](Meetings& self) { return self.meetings.meetings(); })
      .def_property_readonly("outer_parameters",
                             [](Meetings& self) { return self.meetings.outer_parameters(); })
      .def("state_dict",
           [](Meetings& self) {
             return blocking(self.group(), [&] { return self.meetings.state_dict(); });
           })
      .def("load_state_dict", [](Meetings& self, const State& state) {
        blocking(self.group(), [&] { self.meetings.load_state_dict(state); });
      });
}

}  // namespace muster::python
