#include "checkpoint/modules/optimizer_fields.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <nlohmann/json.hpp>
#include <tuple>
#include <typeinfo>

#include "checkpoint/modules/json_values.h"
#include "core/group/errors.h"

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

}  // namespace muster::checkpoint
