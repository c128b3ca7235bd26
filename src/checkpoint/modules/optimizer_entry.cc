// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/modules/optimizer_entry.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <typeinfo>

#include "checkpoint/format/files/json_text.h"
#include "checkpoint/modules/json_values.h"
#include "core/group/errors.h"
#include "muster/zero_redundancy_optimizer.h"

namespace muster::checkpoint {
namespace {

using nlohmann::json;
using namespace torch::optim;

[[noreturn]] void refuse(const std::type_info& type) {
  group::invalid("checkpoint: the optimizer's " + c10::demangle(type.name()) +
                 " is not known: Adam, AdamW, SGD, Adagrad and RMSprop are; add the tensors of "
                 "another one by add_tensor");
}

template <class State>
std::vector<StateField> adam_fields(State& state) {
  return {{"step", nullptr, &state.step()},
          {"exp_avg", &state.exp_avg(), nullptr},
          {"exp_avg_sq", &state.exp_avg_sq(), nullptr},
          {"max_exp_avg_sq", &state.max_exp_avg_sq(), nullptr}};
}

/// Calls visit(name, option) for each option, a reference to it.
template <class Visit>
void visit_options(OptimizerOptions& options, Visit visit) {
  const auto adam = [&](auto& of) {
    visit("lr", of.lr());
    visit("betas", of.betas());
    visit("eps", of.eps());
    visit("weight_decay", of.weight_decay());
    visit("amsgrad", of.amsgrad());
  };
  if (auto* of = dynamic_cast<AdamOptions*>(&options)) return adam(*of);
  if (auto* of = dynamic_cast<AdamWOptions*>(&options)) return adam(*of);
  if (auto* of = dynamic_cast<SGDOptions*>(&options)) {
    visit("lr", of->lr());
    visit("momentum", of->momentum());
    visit("dampening", of->dampening());
    visit("weight_decay", of->weight_decay());
    visit("nesterov", of->nesterov());
    return;
  }
  if (auto* of = dynamic_cast<AdagradOptions*>(&options)) {
    visit("lr", of->lr());
    visit("lr_decay", of->lr_decay());
    visit("weight_decay", of->weight_decay());
    visit("initial_accumulator_value", of->initial_accumulator_value());
    visit("eps", of->eps());
    return;
  }
  if (auto* of = dynamic_cast<RMSpropOptions*>(&options)) {
    visit("lr", of->lr());
    visit("alpha", of->alpha());
    visit("eps", of->eps());
    visit("weight_decay", of->weight_decay());
    visit("momentum", of->momentum());
    visit("centered", of->centered());
    return;
  }
  refuse(typeid(options));
}

}  // namespace

std::vector<StateField> fields_of(OptimizerParamState& state) {
  if (auto* of = dynamic_cast<AdamParamState*>(&state)) return adam_fields(*of);
  if (auto* of = dynamic_cast<AdamWParamState*>(&state)) return adam_fields(*of);
  if (auto* of = dynamic_cast<SGDParamState*>(&state))
    return {{"momentum_buffer", &of->momentum_buffer(), nullptr}};
  if (auto* of = dynamic_cast<AdagradParamState*>(&state))
    return {{"step", nullptr, &of->step()}, {"sum", &of->sum(), nullptr}};
  if (auto* of = dynamic_cast<RMSpropParamState*>(&state))
    return {{"step", nullptr, &of->step()},
            {"square_avg", &of->square_avg(), nullptr},
            {"momentum_buffer", &of->momentum_buffer(), nullptr},
            {"grad_avg", &of->grad_avg(), nullptr}};
  refuse(typeid(state));
}

std::unique_ptr<OptimizerParamState> new_state_for(const OptimizerOptions& options) {
  if (dynamic_cast<const AdamOptions*>(&options)) return std::make_unique<AdamParamState>();
  if (dynamic_cast<const AdamWOptions*>(&options)) return std::make_unique<AdamWParamState>();
  if (dynamic_cast<const SGDOptions*>(&options)) return std::make_unique<SGDParamState>();
  if (dynamic_cast<const AdagradOptions*>(&options)) return std::make_unique<AdagradParamState>();
  if (dynamic_cast<const RMSpropOptions*>(&options)) return std::make_unique<RMSpropParamState>();
  refuse(typeid(options));
}

std::string class_name(const OptimizerOptions& options) {
  if (dynamic_cast<const AdamOptions*>(&options)) return "Adam";
  if (dynamic_cast<const AdamWOptions*>(&options)) return "AdamW";
  if (dynamic_cast<const SGDOptions*>(&options)) return "SGD";
  if (dynamic_cast<const AdagradOptions*>(&options)) return "Adagrad";
  if (dynamic_cast<const RMSpropOptions*>(&options)) return "RMSprop";
  refuse(typeid(options));
}

std::string text_of_options(const OptimizerOptions& options) {
  json all = json::object();
  const auto copy = options.clone();
  visit_options(*copy, [&all](const char* name, auto& option) { all[name] = encoded(option); });
  return all.dump();
}

void read_options(OptimizerOptions& options, const std::string& text) {
  const json all = json::parse(text, nullptr, false);
  if (!all.is_object()) return;
  visit_options(options, [&all](const char* name, auto& option) {
    const auto found = all.find(name);
    if (found == all.end()) return;
    try {
      option = decoded<std::remove_reference_t<decltype(option)>>(*found);
    } catch (const json::exception&) {
      group::invalid(std::string("checkpoint: the optimizer's option '") + name +
                     "' was saved as " + found->dump() + ", which is of another type");
    }
  });
}

namespace {

/// Options by which torch's classes differ: for checkpoints that do not name the class.
constexpr const char* kTelling[] = {"betas",    "momentum", "dampening", "alpha",
                                    "centered", "lr_decay", "rho",       "etas"};

/// As the parameter lies on this rank.
at::Tensor memory_for(const at::Tensor& parameter) { return at::empty_like(parameter.detach()); }

std::set<std::string> names_in(const json& group) {
  std::set<std::string> names;
  for (const json& each : group.at("params"))
    names.insert(each.is_string() ? each.get<std::string>() : each.dump());
  return names;
}

/// The first names of `some` that `others` does not have.
std::string missing_in(const std::set<std::string>& some, const std::set<std::string>& others) {
  std::string text;
  int count = 0;
  for (const std::string& each : some)
    if (!others.contains(each) && count++ < 5) text += (text.empty() ? "'" : ", '") + each + "'";
  return text.empty() ? "none" : text + (count > 5 ? " and more" : "");
}

}  // namespace

OptimizerEntry::OptimizerEntry(std::string name, torch::optim::Optimizer& optimizer,
                               const torch::nn::Module& of)
    : name_(std::move(name)), whole_(optimizer) {
  for (const auto& named : of.named_parameters())
    names_[named.value().unsafeGetTensorImpl()] = named.key();
  for (const auto& group : whole_.param_groups())
    for (const at::Tensor& parameter : group.params()) name_of(parameter);
}

void OptimizerEntry::items(std::vector<CheckpointItem>& items) {
  auto& state = part().state();
  for (auto& group : part().param_groups())
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state.find(parameter.unsafeGetTensorImpl());
      if (found == state.end()) continue;
      for (const StateField& field : fields_of(*found->second)) {
        const std::string name = field_name(parameter, field.name);
        // Python counts steps in a float32 tensor.
        if (field.count != nullptr)
          items.push_back(whole_item(name, at::scalar_tensor(*field.count, at::kFloat)));
        else if (field.tensor->defined())
          items.push_back(state_item(name, *field.tensor, parameter));
      }
    }
}

json OptimizerEntry::groups() const {
  json groups = json::array();
  for (auto& group : whole_.param_groups()) {
    json one = json::parse(text_of_options(group.options()));
    one["params"] = json::array();
    for (const at::Tensor& parameter : group.params()) one["params"].push_back(name_of(parameter));
    groups.push_back(std::move(one));
  }
  return groups;
}

void OptimizerEntry::values(json& values) {
  values[name_ + ".param_groups"] = groups();
  json shapes = json::object();
  for (auto& group : whole_.param_groups())
    for (const at::Tensor& parameter : group.params())
      shapes[name_of(parameter)] = whole_sizes(parameter);
  const auto& all = whole_.param_groups();
  values[name_ + ".identity"] = {{"class", all.empty() ? "" : class_name(all.front().options())},
                                 {"shapes", shapes}};
}

void OptimizerEntry::compare(const json& values, const shards::Index& index) const {
  const auto found = values.find(name_ + ".param_groups");
  if (found == values.end() || !found->is_array())
    group::invalid("checkpoint: " + index.folder + " has no value '" + name_ + ".param_groups'");
  const json mine = groups();
  const std::string what = "checkpoint: '" + name_ + "' ";
  if (found->size() != mine.size())
    group::invalid(what + "has " + std::to_string(mine.size()) + " parameter groups, and " +
                   std::to_string(found->size()) + " were saved in " + index.folder);
  const json identity = values.value(name_ + ".identity", json::object());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const json& saved = (*found)[i];
    const auto kind = [&] { return class_name(whole_.param_groups()[i].options()); };
    if (identity.contains("class") && identity["class"] != kind())
      group::invalid(what + "is of the class " + kind() + ", and " + identity["class"].dump() +
                     " was saved in " + index.folder + ", whose state is another one");
    for (const char* option : kTelling)
      if (mine[i].contains(option) != saved.contains(option))
        group::invalid(what + "is of the class " + kind() + ", and an optimizer " +
                       (saved.contains(option) ? "with" : "without") + " the option '" + option +
                       "' was saved in " + index.folder + ", which is of another class");
    const auto here = names_in(mine[i]), there = names_in(saved);
    if (here != there)
      group::invalid(what + "group " + std::to_string(i) + " was saved in " + index.folder +
                     " with the parameters " + missing_in(there, here) +
                     ", which it has not here, and has " + missing_in(here, there) +
                     ", which were not saved in it");
  }
  const json shapes = identity.value("shapes", json::object());
  for (const auto& group : whole_.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      const auto shape = shapes.find(name_of(parameter));
      const auto sizes = whole_sizes(parameter);
      if (shape != shapes.end() && shards::extent_of(*shape) != sizes)
        group::invalid(what + "the parameter '" + name_of(parameter) +
                       "' was saved with the sizes " + shards::text_of(shards::extent_of(*shape)) +
                       " and has " + shards::text_of(sizes) + " here");
    }
}

/// Refuses a checkpoint that has state under this optimizer's name that would not be loaded.
void OptimizerEntry::refuse_state_of_others(const shards::Index& index) {
  std::set<std::string> known;
  for (auto& group : whole_.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      const auto made = new_state_for(group.options());
      for (const StateField& field : fields_of(*made))
        known.insert(field_name(parameter, field.name));
    }
  const std::string prefix = name_ + ".state.";
  for (auto at = index.tensors.lower_bound(prefix);
       at != index.tensors.end() && at->first.starts_with(prefix); ++at)
    if (!known.contains(at->first))
      group::invalid("checkpoint: '" + at->first + "' of " + index.folder +
                     " is no state that this optimizer has: it was saved by one of another class "
                     "or with other parameters");
}

void OptimizerEntry::wanted(std::vector<CheckpointItem>& items, const shards::Index& index,
                            const json* values) {
  made_.clear();
  counts_.clear();
  options_.clear();
  try {
    if (values != nullptr) compare(*values, index);
  } catch (const json::exception& error) {
    group::invalid("checkpoint: what " + index.folder + " says of '" + name_ +
                   "' is not understood: " + error.what());
  }
  refuse_state_of_others(index);
  for (auto& group : part().param_groups())
    for (const at::Tensor& parameter : group.params()) {
      auto made = new_state_for(group.options());
      bool any = false;
      for (const StateField& field : fields_of(*made)) {
        const std::string name = field_name(parameter, field.name);
        const auto stored = index.tensors.find(name);
        if (stored == index.tensors.end()) continue;
        any = true;
        if (field.count != nullptr) {
          counts_.emplace_back(field.count, at::zeros({}, at::kFloat));
          items.push_back(whole_item(name, counts_.back().second));
          continue;
        }
        *field.tensor = memory_for(parameter);
        items.push_back(state_item(name, *field.tensor, parameter));
      }
      if (!any) made.reset();
      made_.emplace_back(parameter.unsafeGetTensorImpl(), std::move(made));
    }
  if (values == nullptr) return;
  for (const json& each : values->at(name_ + ".param_groups")) options_.push_back(each.dump());
  for (std::size_t i = 0; i < options_.size(); ++i)  // of another type: before anything is changed
    read_options(*whole_.param_groups()[i].options().clone(), options_[i]);
}

void OptimizerEntry::filled() {
  for (auto& [count, tensor] : counts_) *count = static_cast<std::int64_t>(tensor.item<float>());
  auto& state = part().state();
  for (auto& [parameter, made] : made_) {
    if (made)
      state[parameter] = std::move(made);
    else
      state.erase(parameter);
  }
  for (std::size_t i = 0; i < options_.size(); ++i) {
    read_options(whole_.param_groups()[i].options(), options_[i]);
    if (&part() != &whole_) read_options(part().param_groups()[i].options(), options_[i]);
  }
  made_.clear();
  counts_.clear();
}

torch::optim::Optimizer& OptimizerEntry::part() {
  auto* divided = dynamic_cast<parallel::ShardedOptimizer*>(&whole_);
  return divided != nullptr ? divided->local() : whole_;
}

const std::string& OptimizerEntry::name_of(const at::Tensor& parameter) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  if (found == names_.end())
    group::invalid("checkpoint: '" + name_ +
                   "' has a parameter that the module does not have; give the module that the "
                   "optimizer's parameters are of");
  return found->second;
}

std::string OptimizerEntry::field_name(const at::Tensor& parameter, const char* field) const {
  return name_ + ".state." + name_of(parameter) + "." + field;
}

}  // namespace muster::checkpoint
