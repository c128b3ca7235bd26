// SPDX-License-Identifier: BSD-3-Clause
#include "programs.h"

#include <ATen/DeviceAccelerator.h>
#include <muster/spawn.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <utility>

namespace documents {
namespace {

std::string with_dashes(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

/// Whole numbers, those of a floating dtype with their point.
std::string numbers_of(const at::Tensor& tensor) {
  if (tensor.dim() == 0) {
    const auto number = std::to_string(std::lround(tensor.item<double>()));
    return tensor.is_floating_point() ? number + "." : number;
  }
  std::string text;
  for (const auto& part : tensor.unbind()) text += (text.empty() ? "" : ", ") + numbers_of(part);
  return "[" + text + "]";
}

}  // namespace

Program on_threads(int ranks, std::function<void(int)> run, bool destroys) {
  return [ranks, run = std::move(run), destroys](const Arguments&) {
    muster::spawn(
        [&](int rank) {
          muster::init_process_group();
          run(rank);
          if (destroys) muster::destroy_process_group();
        },
        {.nprocs = ranks, .mode = muster::SpawnMode::threads});
  };
}

std::string option(const Arguments& arguments, const std::string& name, std::string otherwise) {
  const auto wanted = "--" + with_dashes(name);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto equals = arguments[i].find('=');
    if (with_dashes(arguments[i].substr(0, equals)) != wanted) continue;
    if (equals != std::string::npos) return arguments[i].substr(equals + 1);
    if (i + 1 < arguments.size()) return arguments[i + 1];
  }
  return otherwise;
}

std::string variable(const char* name, std::string otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::move(otherwise) : value;
}

at::Device accelerator(int index) {
  return {*at::accelerator::getAccelerator(/*checked=*/true), static_cast<at::DeviceIndex>(index)};
}

void say(const std::string& line) { std::cout << line + "\n" << std::flush; }

std::string text_of(const at::Tensor& tensor) {
  const auto device = tensor.is_cpu() ? "" : ", device='" + tensor.device().str() + "'";
  return "tensor(" + numbers_of(tensor.detach().cpu()) + device + ")";
}

std::string text_of(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const auto& each : tensors) text += (text.empty() ? "" : ", ") + text_of(each);
  return "[" + text + "]";
}

std::string text_of(const std::vector<int>& numbers) {
  std::string text;
  for (const int each : numbers) text += (text.empty() ? "" : ", ") + std::to_string(each);
  return "[" + text + "]";
}

}  // namespace documents

int main(int argc, char** argv) {
  documents::Programs programs = documents::operations();
  for (const auto& more :
       {documents::join, documents::debugging, documents::init_methods, documents::averaged_sgd,
        documents::data_parallel, documents::observing, documents::calls})
    programs.merge(more());
  documents::Arguments arguments(argv + 1, argv + argc);
  // A launcher may put an option of its own before the name.
  const auto name = std::find_if(arguments.begin(), arguments.end(),
                                 [](const auto& each) { return !each.starts_with("--"); });
  const auto found = name == arguments.end() ? programs.end() : programs.find(*name);
  if (found == programs.end()) {
    std::cerr << "usage: documents NAME [argument...]; NAME is one of\n";
    for (const auto& [known, program] : programs) std::cerr << "  " << known << "\n";
    return 2;
  }
  arguments.erase(name);
  found->second(arguments);
}
