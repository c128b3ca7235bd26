/// Finds and runs what other workers may call: registered functions and torch's operators.
#pragma once

#include <string_view>

#include "muster/rpc/handler.h"
#include "muster/rpc_function.h"

namespace muster::rpc {

/// Null if there is none. The result is valid until the process exits.
const Function* find_function(std::string_view name);

/// The handler for Kind::call: registered functions and torch's operators.
Handler function_handler();
/// Runs a torch operator ("aten::add") on arguments written by put_arguments. Uses the first
/// overload whose arguments match. Throws DistError if none does, and (Code::refused) if other
/// workers may not call it.
void serve_operator(Request& request);
/// Whether torch has an operator of that name.
bool is_operator(std::string_view name);
/// Whether it is an operator that any worker may call: one that computes tensors from its arguments
/// without side effects (listed in `allowed_operators.cc`).
bool is_computing_operator(std::string_view name);
/// Whether other workers may call it by name on this process.
bool is_allowed_operator(std::string_view name);

}  // namespace muster::rpc
