// SPDX-License-Identifier: BSD-3-Clause
/// The documents' programs in C++: `documents NAME [argument...]` runs one.
#pragma once

#include <ATen/core/Tensor.h>
#include <muster/distributed.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace documents {

/// What stands on the command line beside the program's name.
using Arguments = std::vector<std::string>;
using Program = std::function<void(const Arguments& arguments)>;
using Programs = std::map<std::string, Program>;

Programs operations();     ///< the guide's, of four ranks
Programs join();           ///< uneven inputs, of the tutorial
Programs debugging();      ///< the reference's: monitored barriers, other shapes, unused parameters
Programs init_methods();   ///< the ways to meet, of all documents
Programs averaged_sgd();   ///< the tutorial's, by hand
Programs data_parallel();  ///< the tutorial's, on accelerators
Programs observing();      ///< the reference's: streams and a profile
Programs calls();          ///< the guide's, to another worker

/// Runs `run` on so many ranks, threads of this process that have a default group. `destroys`
/// false: it ends with an error, after which the ranks leave the group as it is.
Program on_threads(int ranks, std::function<void(int rank)> run, bool destroys = true);

/// The value of `--name VALUE` or `--name=VALUE`, with dashes or underscores; else `otherwise`.
std::string option(const Arguments& arguments, const std::string& name, std::string otherwise = {});
/// Of the environment; else `otherwise`.
std::string variable(const char* name, std::string otherwise = {});
/// Of the machine's accelerator.
at::Device accelerator(int index);

/// A line of standard output; ranks' lines do not mix.
void say(const std::string& line);
/// As Python prints them: `tensor([1.])`, `tensor([101], device='cuda:0')`.
std::string text_of(const at::Tensor& tensor);
std::string text_of(const std::vector<at::Tensor>& tensors);
/// As Python prints the numbers of a list: `[0, 1]`.
std::string text_of(const std::vector<int>& numbers);

}  // namespace documents
