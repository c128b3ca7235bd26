// SPDX-License-Identifier: BSD-3-Clause
/// Finds and runs what other workers may call: registered functions and torch's operators.
#pragma once

#include <ATen/core/stack.h>

#include <span>
#include <string_view>
#include <vector>

#include "muster/rpc_function.h"
#include "rpc/agent/handler.h"

namespace muster::rpc {

/// Null if there is none. The result is valid until the process exits.
const Function* find_function(std::string_view name);

/// The handler for MessageKind::call: registered functions and torch's operators.
Handler function_handler();
/// Runs a torch operator ("aten::add") on arguments written by put_arguments. Uses the first
/// overload whose arguments match. Throws DistError if none does, and (Code::refused) if other
/// workers may not call it.
void serve_operator(Request& request);
/// The results of a torch operator on these arguments, by the first overload that they match.
/// Kernels get tensors whose elements lie side by side, each in a place of its own: some read or
/// return other memory where elements overlap. Throws DistError if no overload matches.
torch::jit::Stack call_operator(std::string_view name, std::vector<c10::IValue> given);
/// Whether torch has an operator of that name.
bool is_operator(std::string_view name);
/// Whether it is an operator that any worker may call: one that computes tensors from its arguments
/// without side effects (listed in `operators.cc`).
bool is_computing_operator(std::string_view name);
/// Their names without `aten::`, and without those in place.
std::span<const std::string_view> computing_operators();
/// Whether other workers may call it by name on this process.
bool is_allowed_operator(std::string_view name);

}  // namespace muster::rpc
