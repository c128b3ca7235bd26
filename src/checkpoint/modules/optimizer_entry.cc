#include "checkpoint/modules/optimizer_entry.h"

#include <torch/types.h>

#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/format/plan/json_numbers.h"
#include "checkpoint/modules/optimizer_fields.h"
#include "core/group/errors.h"
#include "muster/zero_redundancy_optimizer.h"

namespace muster::checkpoint {

using nlohmann::json;

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

/// What is stored of this optimizer and would be left out.
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
