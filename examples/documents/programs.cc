#include "programs.h"

#include <muster/spawn.h>
#include <torch/types.h>

#include <cmath>
#include <iostream>

namespace documents {

void say(const std::string& line) { std::cout << line + "\n" << std::flush; }

std::string text_of(const at::Tensor& tensor) {
  std::string text;
  for (const auto& element : tensor.flatten().unbind()) {
    text += text.empty() ? "" : ", ";
    text += std::to_string(std::lround(element.item<double>())) + ".";
  }
  return "tensor([" + text + "])";
}

std::string text_of(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const auto& each : tensors) text += (text.empty() ? "" : ", ") + text_of(each);
  return "[" + text + "]";
}

}  // namespace documents

int main(int argc, char** argv) {
  documents::Programs programs = documents::operations();
  programs.merge(documents::join());
  programs.merge(documents::debugging());
  const auto found = argc == 2 ? programs.find(argv[1]) : programs.end();
  if (found == programs.end()) {
    std::cerr << "usage: documents NAME, which is one of\n";
    for (const auto& [name, program] : programs) std::cerr << "  " << name << "\n";
    return 2;
  }
  const auto& program = found->second;
  muster::spawn(
      [&](int rank) {
        muster::init_process_group();
        program.run(rank);
        if (program.destroys) muster::destroy_process_group();
      },
      {.nprocs = program.ranks, .mode = muster::SpawnMode::threads});
}
