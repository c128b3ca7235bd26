/// The documents' programs in C++: `documents NAME` runs one, its ranks being threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <muster/distributed.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace documents {

/// A program: how many ranks it has, and what each of them does in its job.
struct Program {
  int ranks;
  std::function<void(int rank)> run;
  bool destroys = true;  ///< false: it ends with an error, after which ranks leave as they are
};
using Programs = std::map<std::string, Program>;

Programs operations();  ///< the guide's, of four ranks
Programs join();        ///< uneven inputs, of the tutorial
Programs debugging();   ///< the reference's: monitored barriers, other shapes, unused parameters

/// A line of standard output; ranks' lines do not mix.
void say(const std::string& line);
/// As Python prints them: `tensor([1.])`.
std::string text_of(const at::Tensor& tensor);
std::string text_of(const std::vector<at::Tensor>& tensors);

}  // namespace documents
